"""The page: one file, safe whatever the policy said, and the command that makes it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from episodes import with_turn
from forge.cli import main
from forge.config import RecordConfig
from forge.errors import DataError
from forge.observe.report import write_report
from forge.observe.report.page import embed
from forge.rollout.record import RolloutRecorder
from run_folders import HOSTILE, decode, encode, make_groups, make_grpo_run, write_metrics


class Markup(HTMLParser):
    """The elements of a page with their attributes and texts, as a browser's parser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = f"{tag}#data" if ("id", "data") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_grpo_run(tmp_path_factory.mktemp("runs") / "a <b> & c", num_steps=6)
    return write_report(folder, clock=lambda: 1_790_000_100.0).path.read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Markup(page).texts["script#data"])
    return data


def hostile_run(folder: Path) -> Path:
    """A run whose every text is written to break out of a page."""
    folder.mkdir()
    write_metrics(folder, 2)
    (group,) = make_groups(1, num_groups=1, group_size=1)
    episode = group.episodes[0]
    ids = encode(HOSTILE)
    odd = replace(
        with_turn(episode, token_ids=ids, logprobs=(-1.0,) * len(ids), text=HOSTILE),
        task=replace(episode.task, id=HOSTILE, answer=HOSTILE, messages=({"role": HOSTILE, "content": HOSTILE},)),
        score=replace(episode.score, parts={HOSTILE: 1.0}, failures={HOSTILE: HOSTILE}),
        ref_logprobs=None,
    )
    recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    recorder.write(1, [replace(group, episodes=(odd,))])
    (folder / "config.yaml").write_text(f"run: {{name: {json.dumps(HOSTILE[:40])}}}\n", encoding="utf-8")
    (folder / "ledger.jsonl").write_text(json.dumps({"outcome": HOSTILE}) + "\n")
    return folder


def test_the_page_has_its_data(page: str) -> None:
    data = data_of(page)
    assert data["run"]["lastStep"] == data["run"]["totalSteps"] == 6
    assert data["steps"] == [1, 2, 3, 4, 5, 6]
    assert len(data["columns"]["rollout/reward_mean"]) == 6
    assert len(data["samples"]["items"]) == 48
    assert data["run"]["name"] == "a <b> & c"
    assert "<title>a &lt;b&gt; &amp; c · TorchForge report</title>" in page


def test_the_page_needs_nothing_from_outside(page: str) -> None:
    markup = Markup(page)
    assert not any("src" in attributes or "href" in attributes for _, attributes in markup.tags)
    assert [tag for tag, _ in markup.tags] == [
        "html", "head", "meta", "meta", "meta", "meta", "meta", "title", "style", "body", "noscript", "div", "script",
        "script",
    ]  # fmt: skip
    addresses = set(re.findall(r"https?://[^\s'\"]+", markup.texts["script"] + markup.texts["style"]))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nothing fetches
    assert "@import" not in markup.texts["style"]
    assert "url(" not in markup.texts["style"]


def test_the_policy_admits_the_pages_own_style_and_program_alone(page: str) -> None:
    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    markup = Markup(page)
    (policy,) = [a["content"] for _, a in markup.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy or "").split("; "))
    assert rules == {
        "default-src": "'none'",
        "style-src": digest(markup.texts["style"]),
        "script-src": digest(markup.texts["script"]),
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_the_programs_never_make_markup_of_text(page: str) -> None:
    program = Markup(page).texts["script"]
    assert len(program) > 10_000
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("):
        assert word not in program


def test_hostile_text_stays_text(tmp_path: Path, page: str) -> None:
    hostile = write_report(hostile_run(tmp_path / "run")).path.read_text(encoding="utf-8")
    assert [tag for tag, _ in Markup(hostile).tags] == [tag for tag, _ in Markup(page).tags]
    data = data_of(hostile)
    (item,) = data["samples"]["items"]
    assert "".join(item["pieces"]) == decode(encode(HOSTILE))
    assert "</script><script>" in "".join(item["pieces"])
    assert item["answer"] == item["promptId"] == HOSTILE
    assert item["failures"][HOSTILE] == HOSTILE
    assert data["samples"]["prompts"] == [[{"role": HOSTILE[:40] + item_rest(HOSTILE, 40), "content": HOSTILE}]]
    assert list(data["ledger"]) == [HOSTILE]


def item_rest(text: str, limit: int) -> str:
    return f" … ({len(text) - limit} more characters)"


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&amp;", "\u2028\ud800\x00", HOSTILE])
def test_embedded_json_has_no_character_of_markup(text: str) -> None:
    embedded = embed({text: [text]})
    assert embedded.isascii()
    assert not set("<>&") & set(embedded)
    assert json.loads(embedded) == {text: [text]}


def test_the_size_is_bounded(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=10)
    sizes = [write_report(folder, max_samples=count).num_bytes for count in (0, 8, 80)]
    assert sizes[0] < sizes[1] < sizes[2]
    report = write_report(folder, max_samples=8)
    assert (report.num_shown, report.num_samples, report.last_step) == (8, 80, 10)
    assert report.notes == ("8 of 80 samples are shown, from 2 of 10 steps; more with --max-samples.",)


def test_an_output_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_metrics(folder, 1)
    before = sorted(tmp_path.rglob("*"))
    for output, reason in ((tmp_path / "no" / "page.html", "No such file or directory"), (folder, "Is a directory")):
        with pytest.raises(DataError) as caught:
            write_report(folder, output=output)
        assert caught.value.path == str(output)
        assert caught.value.rule == f"a file in an existing, writable folder: {reason}"
        assert caught.value.repair == "give another --output"
    assert sorted(tmp_path.rglob("*")) == before


# ---- The command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=5)
    assert main(["report", str(folder), "--max-samples", "8"]) == 0
    first, note = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{folder}/report\.html: up to step 5, 8 of 40 samples, 0\.\d MB", first)
    assert note == "  8 of 40 samples are shown, from 2 of 5 steps; more with --max-samples."
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert data_of((tmp_path / "page.html").read_text(encoding="utf-8"))["samples"]["written"] == 40


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path), "--max-samples", "-3"]) == 2
    told = capsys.readouterr().err
    assert "forge report: there is no such run" in told
    assert "forge report: this folder has no metrics of a run" in told
    assert "forge report: the number of samples is out of range" in told


def test_the_command_opens_the_page_and_loads_no_torch(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    program = (
        "import sys; from forge.cli import main; code = main(['report', sys.argv[1], '--open']); "
        "print('torch' in sys.modules, code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True, text=True, timeout=600, check=True, env={**os.environ, "BROWSER": f"{browser} %s"},
    )  # fmt: skip
    assert ran.stdout.splitlines()[-1] == "False 0"
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "report.html").as_uri()


def test_without_a_browser_the_page_is_made_all_the_same(tmp_path: Path) -> None:
    write_metrics(tmp_path, 2)
    command = [sys.executable, "-m", "forge.cli", "report", tmp_path, "--open"]
    environment = {**os.environ, "BROWSER": "/nothing/here %s", "PATH": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment)
    assert "No browser could be started here" in ran.stdout
    assert (tmp_path / "report.html").is_file()


def test_the_options_are_what_the_library_has() -> None:
    from forge.cli.report import _DEFAULT_SAMPLES
    from forge.observe.report.page import DEFAULT_SAMPLES

    assert _DEFAULT_SAMPLES == DEFAULT_SAMPLES
