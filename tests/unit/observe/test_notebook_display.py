"""How a run and its results look in a notebook: pure HTML, bounded, and safe whatever a run is called or says."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from forge.errors import DataError
from forge.loops.evaluation import Evaluation
from forge.loops.results import GRPOResult, SupervisedResult
from forge.observe.notebook import NotebookSink, is_notebook, without_groups
from forge.observe.notebook.charts import chart_svg, charts_html, inline_charts
from forge.observe.notebook.completions import read_completions
from forge.observe.notebook.curves import MAX_POINTS, Curve, Curves
from forge.observe.notebook.live import sparkline

EVIL = "<script>alert(1)</script>\"'&"


class Page:
    """Stands for a cell's output: keeps all that was shown there."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []

    def show(self, html: str, text: str) -> None:
        self.shown.append((html, text))


class Balance(HTMLParser):
    """Counts that every element is closed, and keeps the names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(html: str) -> str:
    """The HTML, when all elements are closed and none can run anything."""
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "script" not in parser.names
    return html


def curve_of(*values: float) -> Curve:
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    return curve


def test_a_curve_keeps_a_bounded_number_of_means() -> None:
    curve = curve_of(*range(10_000))
    assert MAX_POINTS / 2 <= len(curve.points) <= MAX_POINTS
    assert curve.last == 9_999
    steps, values = zip(*curve.points, strict=True)
    assert list(steps) == sorted(steps)
    assert steps[-1] == 10_000
    stride = steps[1] - steps[0]
    assert values[0] == pytest.approx(sum(range(stride)) / stride)
    full = [value for step, value in curve.points if step % stride == 0]
    assert [b - a for a, b in itertools.pairwise(full)] == pytest.approx([stride] * (len(full) - 1))


def test_a_curve_says_where_it_was_not_finite() -> None:
    curve = curve_of(1.0, math.nan, math.inf, 2.0)
    assert curve.points == [(1, 1.0), (4, 2.0)]
    assert curve.nonfinite_at == 2


def test_charts_are_those_of_the_report_with_lines_that_differ() -> None:
    curves = Curves()
    for step in range(5):
        solved = {"evaluation/reward": 0.1 * step, "evaluation/avg@1": 0.1 * step, "evaluation/pass@2": 0.2 * step}
        curves.add(
            step, {"rollout/reward_mean": 0.5, "train/approx_kl": 0.0, "time/step": 1.0, "note": "text", **solved}
        )
    found = inline_charts(curves)
    assert list(found) == ["Reward", "Held-out evaluation"]  # what is exactly on-policy has no divergence to show
    assert [one.label for one in found["Held-out evaluation"]] == ["reward", "pass@2"]
    curves.add(5, {"train/approx_kl": 0.01})
    assert "KL divergence" in inline_charts(curves)


@pytest.mark.parametrize("values", [(1.0,), (2.0, 2.0), (-1e308, 1e308), (0.0, 0.0), (math.nan,), (1e-300, 2e-300)])
def test_a_chart_can_be_drawn_of_any_values(values: tuple[float, ...]) -> None:
    from forge.observe.notebook.charts import Series

    svg = checked(chart_svg(EVIL, [Series(EVIL, curve_of(*values))]))
    numbers = [float(each) for each in re.findall(r'(?:c[xy]=|points=")"?([-\d.]+)', svg)]
    assert all(map(math.isfinite, numbers))
    assert "nan" not in re.sub(r'aria-label="[^"]*"|<title>.*?</title>', "", svg)


def test_a_chart_says_in_words_what_it_shows() -> None:
    from forge.observe.notebook.charts import Series

    svg = chart_svg("Reward", [Series("mean", curve_of(0.25, 0.75))])
    assert 'aria-label="Reward: mean from 0.25 at step 1 to 0.75 at step 2"' in svg
    assert "not finite at step 1" in checked(charts_html({"Loss": [Series("loss", curve_of(math.nan))]}))


def test_the_display_changes_in_place_and_not_too_often() -> None:
    page, seconds = Page(), [0.0]
    sink = NotebookSink(name=EVIL, total_steps=40, output=page, clock=lambda: seconds[0], refresh_s=1.0)
    for step in range(1, 11):
        seconds[0] = step / 2
        sink.write(step, {"rollout/reward_mean": step / 10, "time/step": 0.5, "time/training": 0.25})
    assert len(page.shown) == 5
    sink.close()
    sink.close()
    assert len(page.shown) == 6
    html, text = page.shown[-1]
    assert "step 10/40, 0:00:05, 0:00:15 left" in checked(html)
    assert "Last step: 0.50 s (train 50%)" in html
    assert "width:25.0%" in html
    assert text.splitlines()[1].split() == ["Reward", "1", "▁▁▂▃▄▅▆▇██"]
    with pytest.raises(ValueError, match="NotebookSink is closed"):
        sink.write(11, {})


def test_a_resumed_run_counts_only_its_own_steps_for_the_time_that_is_left() -> None:
    page, seconds = Page(), [0.0]
    sink = NotebookSink(name="run", total_steps=40, resume_step=30, output=page, clock=lambda: seconds[0])
    seconds[0] = 8.0
    sink.write(32, {"train/loss": 1.0})
    assert "step 32/40, 0:00:08, 0:00:32 left" in page.shown[-1][0]


def test_a_front_end_that_is_gone_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(Page):
        def show(self, html: str, text: str) -> None:
            super().show(html, text)
            raise OSError("no route")

    page = Gone()
    sink = NotebookSink(name="run", output=page, refresh_s=0.0)
    sink.write(1, {"train/loss": 1.0})
    sink.write(2, {"train/loss": 1.0})
    sink.close()
    assert len(page.shown) == 1
    assert "OSError: no route; the run continues" in caplog.text


def test_the_size_of_the_display_does_not_grow_with_the_run() -> None:
    page = Page()
    sink = NotebookSink(name="run", output=page, clock=lambda: 0.0)
    names = ("rollout/reward_mean", "train/entropy", "train/grad_norm", "rollout/length_mean", "train/kl")
    for step in range(20_000):
        sink.write(step, dict.fromkeys(names, step * 1.000001))
    sink.close()
    assert len(page.shown[-1][0]) < 40_000


def test_a_sparkline_has_eight_levels() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline(list(map(float, range(8)))) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(map(float, range(1000))))) == 40


def test_this_is_no_notebook() -> None:
    assert not is_notebook()


# ---- Results -------------------------------------------------------------------------------------------------------


def write_run(folder: Path) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    lines = [{"step": s, "time": 0.0, "values": {"rollout/reward_mean": s / 4, "train/loss": 0.1}} for s in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2, 5):
        episodes = [episode(step, reward=reward / 4) for reward in range(5)]
        text = "".join(json.dumps(each) + "\n" for each in episodes)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    return folder


def episode(step: int, *, reward: float) -> dict[str, Any]:
    return {
        "step": step,
        "group": 7,
        "prompt": [{"role": "user", "content": EVIL}],
        "answer": "4",
        "text": f"{EVIL} 4",
        "pieces": [EVIL, " 4"],
        "logprobs": [-0.001, None if reward == 0.25 else -3.0],
        "reward": reward,
        "parts": {"right": reward, "short": 1.0},
        "advantage": reward - 0.5,
        "finish_reason": "length",
    }


def result_in(folder: Path | None, **changes: Any) -> GRPOResult:
    evaluations = [Evaluation(20, 0.25, 0.25, {1: 0.25}, 7.0), Evaluation(20, 0.75, 0.75, {1: 0.75}, 7.0)]
    plain = {"is_stopped": False, "export": Path(EVIL), "report": None, "folder": folder}
    return GRPOResult(3, 0.75, *evaluations, **(plain | changes))


def test_a_result_shows_what_it_came_to_and_its_curves(tmp_path: Path) -> None:
    page = checked(result_in(write_run(tmp_path))._repr_html_())
    assert "Done after 3 steps" in page
    assert "25.0% → 75.0% of 20 prompts solved" in page
    assert "Reward: mean from 0.25 at step 1 to 0.75 at step 3" in page
    assert "<svg" not in result_in(tmp_path / "moved")._repr_html_()


def test_results_show_without_what_they_do_not_have() -> None:
    page = checked(GRPOResult.not_started(4, exit_code=130, folder=Path("nowhere"))._repr_html_())
    assert "Stopped after 4 steps" in page
    assert "nan" not in page
    page = checked(SupervisedResult(7, 1.5, 1.25, 1.0, None)._repr_html_())
    assert "Done after 7 steps" in page
    assert "lowest validation loss" in page
    assert "75.0%" in checked(Evaluation(20, 0.75, 0.75, {1: 0.75}, 7.0)._repr_html_())


def test_completions_are_shown_from_the_lowest_reward_to_the_highest(tmp_path: Path) -> None:
    found = result_in(write_run(tmp_path)).completions(3)
    assert [each.reward for each in found] == [0.0, 0.5, 1.0]
    assert {each.step for each in found} == {5}
    page = checked(found._repr_html_())
    assert "expected: 4" in page
    assert "cut off by length" in page
    assert "right 0.5, short 1" in page
    assert page.count("probability 0.0498, logprob -3") == 3
    (second,) = [each for each in read_completions(tmp_path, num=5, step=2) if each.reward == 0.25]
    assert "probability nan" in checked(second._repr_html_())
    assert "no completions" in read_completions(tmp_path, num=0)._repr_html_()


def test_completions_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_completions(write_run(tmp_path), step=3)
    assert caught.value.rule == "recorded steps: 1-2, 5"
    assert caught.value.value == 3
    with pytest.raises(DataError) as caught:
        read_completions(tmp_path / "other")
    assert caught.value.repair == "run with record.rollouts: all or some"
    with pytest.raises(DataError) as caught:
        result_in(None).completions()
    assert caught.value.path == "folder"
    (tmp_path / "rollouts" / "step_000005.jsonl").write_text('{"step": 5}\n')
    with pytest.raises(DataError) as caught:
        read_completions(tmp_path)
    assert str(caught.value.path).endswith("step_000005.jsonl:1")


# ---- Errors ----------------------------------------------------------------------------------------------------------


def test_an_error_loses_the_groups_that_it_was_raised_in() -> None:
    async def fails() -> None:
        raise KeyError("reward")

    async def scenario() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
        except BaseExceptionGroup as errors:
            try:
                raise errors.exceptions[0] from None
            except KeyError as error:
                raise ValueError("the run failed") from error

    with pytest.raises(ValueError, match="the run failed") as caught:
        asyncio.run(scenario())
    assert isinstance(caught.value.__context__, KeyError)
    without_groups(caught.value)
    assert isinstance(caught.value.__context__, KeyError)
    assert caught.value.__context__.__context__ is None
