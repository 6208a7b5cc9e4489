"""Why a run of reinforcement learning does not learn, from its files: `forge diagnose`.

Each rule knows one symptom, and speaks only where the evidence is strong: healthy runs, noisy ones too, have no
findings. No finding does not mean that all is well.
"""

from forge.observe.diagnosis.evidence import Evidence, read_evidence
from forge.observe.diagnosis.findings import Finding
from forge.observe.diagnosis.report import Diagnosis, diagnose, diagnosis_lines

__all__ = ["Diagnosis", "Evidence", "Finding", "diagnose", "diagnosis_lines", "read_evidence"]
