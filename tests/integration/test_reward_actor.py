"""`RewardActor` and `RewardModel` as services, on real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from forge.config.rewards import JudgeConfig, OverlongConfig, RewardConfig, RewardModelConfig, RewardsConfig
from forge.errors import ConfigError, DataError, ModelError
from forge.loops.reward_models import scorer_of
from forge.rollout.reward_actor import RewardActor, overlong_part
from forge.rollout.reward_model import RewardModel
from forge.types import Completion, Task
from reward_actors import PlainJudge

pytestmark = pytest.mark.usefixtures("leaves_nothing")
PROMPT = Task("sum:1", messages=({"role": "user", "content": "2 + 2?"},), answer="4", metadata={"level": 3})


def completion(text: str, num_tokens: int = 2) -> Completion:
    return Completion((1,), tuple(range(num_tokens)), (-0.5,) * num_tokens, None, text, "stop")


def own(function: str, *, weight: float = 1.0, timeout_s: float = 100.0, **args: Any) -> RewardConfig:
    return RewardConfig(
        kind=f"reward_functions:{function}", name=function, weight=weight, timeout_s=timeout_s, args=args
    )


def test_scores_are_weighted_sums_and_failures_are_said(drive: Any) -> None:
    config = RewardsConfig(
        functions=(
            RewardConfig(kind="exact", weight=2.0, timeout_s=100),
            own("number_of", weight=0.5),
            RewardConfig(kind="judge", name="taste", weight=10.0, args={"scale": 5}, timeout_s=100),
        ),
        overlong=OverlongConfig(max_tokens=10, buffer=4, penalty=2.0),
        judge=JudgeConfig(path="judge"),
        num_workers=2,
    )

    async def body() -> None:
        judge = await PlainJudge.as_service()
        rewards = await RewardActor.options(num_threads=1).as_service(config, judge=judge)
        texts = [completion("4"), completion("Score: 4", 9), completion("break", 12)]
        first, second, third = await rewards.score.route(PROMPT, texts)
        assert first.parts == {"exact": 1.0, "number_of": 4.0, "taste": 0.8, "overlong": 0.0}
        assert first.unshaped == first.reward
        assert first.reward == pytest.approx(2.0 * 1.0 + 0.5 * 4.0 + 10.0 * 0.8)
        assert first.failures == {}
        assert second.parts == {"exact": 0.0, "number_of": 0.0, "taste": 0.8, "overlong": -1.5}
        assert second.unshaped == pytest.approx(second.reward + 1.5)
        assert second.reward == pytest.approx(10.0 * 0.8 - 1.5)
        assert list(second.failures) == ["number_of"]
        assert "could not convert string to float" in second.failures["number_of"]
        assert third.reward == -2.0
        assert third.failures["taste"].startswith("RuntimeError: the judge broke")
        (none,) = await rewards.score.route(PROMPT, [completion("no mark")])
        assert none.failures["taste"] == "the judge gave no score; it ended with 'Thinking. no mark'"
        assert await rewards.score.route(PROMPT, []) == []
        stats = await rewards.stats.route()
        assert len(stats.pop("worker_pids")) == 2
        assert stats == {"num_scored": 4, "num_failures": {"number_of": 3, "taste": 2}, "num_killed": 0, "num_lost": 0}

    drive(body())


def test_rewards_run_at_once_and_late_ones_are_given_up(drive: Any, tmp_path: Path) -> None:
    for name in ("meeting", "hanging"):
        os.mkfifo(tmp_path / name)
    meeting = RewardsConfig(functions=(own("meets", fifo=str(tmp_path / "meeting")),), num_workers=2)
    late = RewardsConfig(
        functions=(
            own("hangs", fifo=str(tmp_path / "hanging"), timeout_s=10.0),
            RewardConfig(kind="judge", timeout_s=0.5),
        ),
        judge=JudgeConfig(path="judge"),
    )

    async def body() -> None:
        rewards = await RewardActor.options(num_threads=1).as_service(meeting)
        scores = await rewards.score.route(PROMPT, [completion("r"), completion("w")])
        assert [score.reward for score in scores] == [1.0, 1.0]
        judge = await PlainJudge.as_service()
        rewards = await RewardActor.options(num_threads=1).as_service(late, judge=judge)
        reading = os.open(tmp_path / "hanging", os.O_RDONLY | os.O_NONBLOCK)
        (score,) = await rewards.score.route(PROMPT, [completion("hang")])
        assert score.failures["hangs"] == "it took longer than 10 s, and was killed"
        assert score.failures["judge"].startswith("CallTimeout: PlainJudge.generate")
        pids = [int(word) for word in os.read(reading, 100).split()]
        os.close(reading)
        assert len(pids) == 2
        going = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                going.append(psutil.Process(pid))
        assert psutil.wait_procs(going, timeout=600)[1] == []
        assert (await rewards.stats.route())["num_killed"] == 1

    drive(body())


def test_a_replica_that_is_killed_is_replaced_and_its_workers_die(drive: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    config = RewardsConfig(functions=(own("waits_once", folder=str(tmp_path)),))

    async def body() -> None:
        rewards = await RewardActor.options(num_threads=1).as_service(config)
        asked = asyncio.create_task(rewards.score.route(PROMPT, [completion("")]))
        worker = psutil.Process(int(await asyncio.to_thread((tmp_path / "fifo").read_text)))
        (tmp_path / "again").touch()
        os.kill((await rewards.get_metrics()).replicas[0].pids[0], signal.SIGKILL)
        (score,) = await asked
        assert (score.reward, score.failures) == (1.0, {})
        assert psutil.wait_procs([worker], timeout=600)[1] == []

    drive(body())


def test_what_cannot_be_scored_is_refused_at_the_start(drive: Any) -> None:
    async def body() -> None:
        config = RewardsConfig(functions=(RewardConfig(kind="judge"),), judge=JudgeConfig(path="judge"))
        with pytest.raises(ConfigError) as caught:
            await RewardActor.options(max_restarts=0).as_service(config)
        assert (caught.value.path, caught.value.value) == ("rewards.functions[0].kind", "judge")

    drive(body())


def test_overlong_part_falls_in_a_line() -> None:
    config = OverlongConfig(max_tokens=10, buffer=4, penalty=2.0)
    assert [overlong_part(length, config) for length in (0, 6, 7, 8, 10, 11)] == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]


def make_classifier(folder: Path, *, num_labels: int = 1) -> Path:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from forge.models.tiny import make_tiny

    make_tiny(folder / "base", num_layers=2)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=num_labels)
    torch.nn.init.normal_(model.score.weight, std=3.0)
    model.save_pretrained(folder / "classifier")
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "classifier")
    return folder / "classifier"


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_reward_model_gives_each_conversation_its_own_number(
    engine: Literal["native", "vllm"], drive: Any, tmp_path: Path, one_thread: None
) -> None:
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_classifier(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    alone = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    config = RewardModelConfig(path=str(folder), engine=engine, max_seq_len=200)
    texts = ["4", "five is the answer", "4" + tokenizer.eos_token, "a " * 40, "?", "4"]
    conversations: list[Any] = [[*PROMPT.messages, {"role": "assistant", "content": text}] for text in texts]
    ends = [tokenizer.decode([0]), tokenizer.decode([1]), tokenizer.eos_token]
    conversations += ["plain text", *(f"plain text{end}" for end in ends)]  # whatever is the pad, one ends with it
    assert tokenizer(conversations[-3])["input_ids"][-1] == 0

    def by_hand(conversation: Any) -> float:
        is_text = isinstance(conversation, str)
        text = conversation if is_text else tokenizer.apply_chat_template(conversation, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=is_text)["input_ids"]])
        with torch.inference_mode():
            return float(alone(input_ids=ids).logits[0, 0])

    async def body() -> None:
        model = await RewardModel.options(num_threads=1).as_service(config, scorer_of(config))
        numbers = await asyncio.gather(*(model.score.route(each) for each in conversations))
        assert numbers == pytest.approx([by_hand(each) for each in conversations], abs=1e-4)
        assert len({round(number, 3) for number in numbers}) == len(conversations) - 1
        outcomes = await asyncio.gather(
            model.score.route("word " * 500), model.score.route(conversations[0]), return_exceptions=True
        )
        assert isinstance(outcomes[0], DataError)
        assert (outcomes[0].path, outcomes[0].value > 200) == ("rewards.reward_model.max_seq_len", True)
        assert outcomes[1] == pytest.approx(numbers[0], abs=1e-4)
        rewards = RewardsConfig(
            functions=(RewardConfig(kind="reward_model", args={"squash": "sigmoid"}, timeout_s=100),),
            reward_model=config,
        )
        actor = await RewardActor.options(num_threads=1).as_service(rewards, reward_model=model)
        (score,) = await actor.score.route(PROMPT, [completion("4")])
        assert score.reward == pytest.approx(float(torch.tensor(numbers[0]).sigmoid()), abs=1e-4)

    drive(body())


def test_a_model_with_more_labels_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a folder with config\.json"):
        RewardModel(RewardModelConfig(path=str(tmp_path / "none"))).setup()
    folder = make_classifier(tmp_path, num_labels=3)
    with pytest.raises(ModelError) as caught:
        RewardModel(RewardModelConfig(path=str(folder))).setup()
    assert "3 labels" in str(caught.value.value)
    with pytest.raises(ModelError):
        RewardModel(RewardModelConfig(path=str(tmp_path / "base"))).setup()
