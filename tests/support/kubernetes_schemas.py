"""Compare Kubernetes objects with the API's schemas. Run with the Python of a venv that has kubernetes-validate.

usage: kubernetes_schemas.py VERSION…, such as 1.25, with a JSON list of objects on standard input

Prints a JSON list of what is wrong, one text for each. Fields that the API does not know are wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def make_validators(version: str, kinds: set[str]) -> dict[str, Any]:
    """Return the validator of each kind, such as `statefulset-apps-v1`."""
    import kubernetes_validate
    from jsonschema.validators import Draft202012Validator
    from referencing import Registry, Resource

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    registry = Resource.from_contents(json.loads((folder / "_definitions.json").read_text())) @ Registry()
    return {
        kind: Draft202012Validator(json.loads((folder / f"{kind}.json").read_text()), registry=registry)
        for kind in kinds
    }


def kind_of(each: dict[str, Any]) -> str:
    """Return the kind of an object as the files of the schemas are named."""
    group, _, version = each["apiVersion"].rpartition("/")
    return "-".join(filter(None, (each["kind"].lower(), group.partition(".")[0], version)))


def main(versions: list[str]) -> None:
    objects = json.load(sys.stdin)
    problems: list[str] = []
    for version in versions:
        validators = make_validators(version, set(map(kind_of, objects)))
        for number, each in enumerate(objects):
            errors = validators[kind_of(each)].iter_errors(each)
            problems += [f"{version}, object {number}: {error.json_path}: {error.message}" for error in errors]
    json.dump(problems, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
