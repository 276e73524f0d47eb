"""`kite eval`: every figure against torch, what is refused before an engine starts, and that nothing is left."""

import asyncio
import json
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from kite import probes
from kite.engine import Engine, EngineProcess, free_port
from kite.proof import read_pair
from kite.testing import zoo
from kite.testing.adapters import adapter
from kite.testing.eventually import eventually
from kite.testing.llama import Llama
from kite.testing.reference import Reference
from kite_cli.evaluation.recipes import anchors, listed, order
from kite_cli.testing import Ended, command

Kite = Callable[..., Ended]
Make = Callable[..., Path]
Record = dict[str, Any]  # JSON
BASE = "tiny"
BLEND = "credit=0.6,mood=0.3"
KL_PART_MAX = 0.01  # of a KL of some nats: the blend's half precision moves the next token by thousandths of a nat
PROMPTS = tuple(f"case {number}:" for number in range(12))
END_S = 60.0


def lines(ended: Ended) -> list[Record]:
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


@pytest.fixture(params=["fake_server", pytest.param("vllm_server", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest) -> EngineProcess:
    """A running server of the tiny base."""
    found: object = request.getfixturevalue(request.param)
    assert isinstance(found, EngineProcess)
    return found


@pytest.fixture
def pair(make_adapter: Make) -> tuple[Path, Path]:
    """Two adapters of the tiny base."""
    return make_adapter("credit", seed=1), make_adapter("mood", seed=2)


@pytest.fixture
def models(tiny_model: Llama, pair: tuple[Path, Path]) -> Mapping[str, Llama]:
    """What the engine serves, merged by torch."""
    credit, mood = pair
    return {
        "base": tiny_model,
        "credit": tiny_model.merged([(credit, 1.0)]),
        "mood": tiny_model.merged([(mood, 1.0)]),
        BLEND: tiny_model.merged([(credit, 0.6), (mood, 0.3)]),
    }


@pytest.fixture
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_base / "tokenizer.json"))


def likeliest(model: Llama, tokenizer: Tokenizer, prompt: str) -> int:
    return int(model.next_logprobs(tokenizer.encode(prompt).ids).argmax())


def speaking(base: Path, tokens: list[int], folder: Path) -> Path:
    """Copy the tiny base, with a text for each of some tokens that no text stands for."""
    shutil.copytree(base, folder)
    extended = Tokenizer.from_file(str(base / "tokenizer.json"))
    words = [word for token in set(tokens) if (word := extended.id_to_token(token)) is not None]
    extended.add_special_tokens(words)  # pyright: ignore[reportUnknownMemberType] - its list is untyped
    extended.save(str(folder / "tokenizer.json"))
    return folder


async def served(url: str) -> tuple[str, ...]:
    async with Engine(url) as engine:
        return await engine.models()


def test_every_figure_is_that_of_torch(  # noqa: PLR0917 - fixtures
    kite: Kite,
    server: EngineProcess,
    tiny_base: Path,
    pair: tuple[Path, Path],
    models: Mapping[str, Llama],
    tokenizer: Tokenizer,
    tmp_path: Path,
):
    """Half of the task is what one member says, half what the blend says: neither base nor members are perfect."""
    says = {name: [likeliest(model, tokenizer, prompt) for prompt in PROMPTS] for name, model in models.items()}
    answers = says["credit"][:6] + says[BLEND][6:]
    base = speaking(tiny_base, answers, tmp_path / "speaking")
    texts = Tokenizer.from_file(str(base / "tokenizer.json"))
    task = tmp_path / "cases.jsonl"
    cases = [
        {"prompt": prompt, "answer": texts.id_to_token(token), "answer_id": token}
        for prompt, token in zip(PROMPTS, answers, strict=True)
    ]
    task.write_text("\n".join(map(json.dumps, cases)) + "\n\n")

    options = ("--adapter-pair", *pair, "--weights", "0.6,0.3", "--base", base, "--task", task)
    run, *found = lines(kite("eval", *options, "--server", server.url, "--json"))

    assert run["blends"][BLEND] == {
        "method": "concatenate",
        "rank": 8,
        "residual_ppm": 0,
        "weights_ppm": {"base": 100_000, "credit": 600_000, "mood": 300_000},
    }
    assert (run["probes"], run["positions"]) == (probes.default().digest, 17)
    distances = {record["from"]: record for record in found if record["record"] == "distance"}
    assert {name: record["weight_ppm"] for name, record in distances.items()} == run["blends"][BLEND]["weights_ppm"]
    reference = Reference(models, tokenizer)
    for other, record in distances.items():
        expected = asyncio.run(read_pair(reference, other, reference, BLEND, probes.default().prompts))
        assert record["kl_micronats"] == pytest.approx(expected.kl_micronats, rel=KL_PART_MAX)
        assert record["p99_micronats"] == pytest.approx(expected.p99_micronats, rel=KL_PART_MAX)
        assert record["covered_ppm"] == pytest.approx(expected.covered_ppm, rel=KL_PART_MAX)
        same = [
            likeliest(models[other], tokenizer, prompt) == likeliest(models[BLEND], tokenizer, prompt)
            for prompt in probes.default().prompts
        ]
        assert record["top1_ppm"] == sum(same) * 1_000_000 // len(same)
    right = {record["model"]: record["right"] for record in found if record["record"] == "accuracy"}
    assert right == {
        name: sum(said == answer for said, answer in zip(said_all, answers, strict=True))
        for name, said_all in says.items()
    }
    assert 6 <= right["credit"] < 12
    assert asyncio.run(served(server.url)) == (BASE,)


def test_an_engine_of_its_own_is_drawn_for_people_and_ended(tiny_base: Path, pair: tuple[Path, Path]):
    """On a terminal: a bar beside each share. A blend of one member at its full weight is that member."""
    credit, mood = map(str, pair)
    argv = command(
        *("eval", "--adapter-pair", credit, mood, "--anchor", "mood=0.7", "--blend", f"{credit}=1"),
        *("--base", str(tiny_base), "--engine", "fake"),
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen(argv, stdout=theirs, stderr=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        drawn = read_all(ours)
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode == 0, said
    assert "5 models, 170 answers to read" in said
    two, _, alone = drawn.partition("credit=1: rank 4")
    assert "credit=0.3,mood=0.7: rank 8" in two
    assert "0.7 anchored" in two
    assert "█" * 10 + " 1.000" not in two
    assert "█" * 10 + " 1.000" in alone
    assert "17 probes on fake" in alone


def read_all(terminal: int) -> str:
    """Read a terminal until nobody writes to it any more."""
    found = b""
    while True:
        try:
            part = os.read(terminal, 4_096)
        except OSError:  # the other side is closed
            part = b""
        if not part:
            os.close(terminal)
            return found.decode()
        found += part


def test_ctrl_c_leaves_nothing(tiny_base: Path, pair: tuple[Path, Path]):
    argv = command("eval", "--adapter-pair", *map(str, pair), "--base", str(tiny_base), "--engine", "fake")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        engines = asyncio.run(eventually(lambda: psutil.Process(process.pid).children(recursive=True), END_S))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=END_S)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert [engine for engine in engines if engine.is_running()] == []


def test_a_dry_run_says_that_nothing_was_measured(kite: Kite, tiny_base: Path, pair: tuple[Path, Path]):
    options = ("eval", "--adapter-pair", *pair, "--base", tiny_base, "--dry-run")
    told = kite(*options)
    assert told.code == 0
    assert "credit=0.5,mood=0.5: rank 8, for servers with --max-lora-rank 8 or more" in told.out
    assert told.out.endswith("only form and compatibility were checked: nothing was measured (--dry-run)\n")
    credit, mood, blend = lines(kite(*options, "--json"))
    assert (credit["member"], credit["rank"], credit["modules"], mood["member"]) == ("credit", 4, 12, "mood")
    exact = {"rank": 8, "max_lora_rank": 8, "method": "concatenate", "residual_ppm": 0}
    assert blend == {"record": "blend", "blend": "credit=0.5,mood=0.5", **exact, "measured": False}


def test_a_blend_of_too_high_a_rank_is_recompressed_and_says_what_it_lost(
    kite: Kite, tiny_base: Path, make_adapter: Make
):
    members = [make_adapter(name, seed=seed) for seed, name in enumerate(("one", "two", "three"))]
    options = ("eval", "--blend", ",".join(map(str, members)), "--base", tiny_base, "--dry-run", "--max-lora-rank")
    *_, blend = lines(kite(*options, "8", "--json"))
    assert (blend["rank"], blend["method"]) == (8, "recompress")
    assert 100_000 < blend["residual_ppm"] < 900_000
    assert "rank 8, recompressed: " in kite(*options, "8").out
    refused = kite(*options, "9")
    assert (refused.code, "--max-lora-rank 9: vLLM takes none such" in refused.err) == (2, True)


def test_a_promoted_blend_of_the_fleet_is_evaluated_as_it_stands(on: Kite, make_adapter: Make):
    path = make_adapter("judged", seed=31)
    inject = ("upcycle", "inject", "--adapter", path, "--target", BASE, "--blend", "judged-blend")
    assert on(*inject, "--weight", "0.35", "--anchor", "judged").code == 0
    member, blend = lines(on("eval", "--blend", "judged-blend", "--dry-run", "--json"))
    assert (member["member"], blend["blend"]) == ("judged", "judged=0.35")
    unknown = on("eval", "--blend", "nobodys", "--dry-run")
    assert (unknown.code, "no blend 'nobodys'" in unknown.err) == (1, True)


def test_weights_that_are_not_given_share_what_is_left():
    parts = [listed("a,b,c"), listed("a=0.6,b,c"), listed("a,b")]
    asked = order(parts, anchors(["b=0.25"]))
    assert [recipe.name for recipe in asked.recipes] == [
        "a=0.375,b=0.25,c=0.375",
        "a=0.6,b=0.25,c=0.15",
        "a=0.75,b=0.25",
    ]
    (thirds,) = order([listed("a,b,c")], {}).recipes
    assert (thirds.name, thirds.base_weight_ppm) == ("a=0.333333,b=0.333333,c=0.333333", 1)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "no blend is named"),
        (("--weights", "0.5,0.5"), 2, "--weights belongs to --adapter-pair"),
        (("--adapter-pair", "CREDIT", "MOOD", "--weights", "0.5"), 2, "names 1 weights"),
        (("--adapter-pair", "CREDIT", "MOOD", "--weights", "0.7,0.5"), 2, "leave no room"),
        (("--adapter-pair", "CREDIT", "MOOD", "--weights", "0.5,zero"), 2, "'zero' is no number"),
        (("--adapter-pair", "CREDIT", "CREDIT"), 2, "a member is listed twice"),
        (
            ("--blend", "CREDIT=0.3,MOOD=0.7", "--adapter-pair", "CREDIT", "MOOD", "--weights", "0.3,0.7"),
            2,
            "given twice",
        ),
        (("--adapter-pair", "CREDIT", "MOOD", "--anchor", "fraud=0.5"), 2, "no such member"),
        (("--adapter-pair", "CREDIT", "MOOD", "--anchor", "mood"), 2, "--anchor mood cannot be"),
        (("--blend", "CREDIT=0.3,MOOD", "--anchor", "credit=0.5"), 2, "credit has two weights"),
        (("--blend", "CREDIT=0.3,"), 2, "names no adapter"),
        (("--blend", "OTHER/credit,CREDIT"), 2, "two members are called credit"),
        (("--adapter-pair", "CREDIT", "nowhere/mood"), 1, "adapter nowhere/mood is not a folder"),
        (("--adapter-pair", "CREDIT", "OTHER/sibling"), 1, "sibling breaks the contract of tiny"),
        (("--adapter-pair", "CREDIT", "OTHER/empty"), 1, "missing_file"),
        (("--blend", "nobodys"), 1, "nobodys is not a folder, and there is no fleet in"),
        (("--blend", "CREDIT", "--task", "nowhere.jsonl"), 1, "task nowhere.jsonl cannot be read"),
        (("--blend", "CREDIT", "--probes", "nowhere.txt"), 1, "probes nowhere.txt cannot be read"),
        (("--blend", "CREDIT", "--server", "127.0.0.1:80"), 2, "is no address of a server"),
        (("--blend", "CREDIT", "--server", "SILENT"), 4, "no answer to"),
    ],
)
def test_what_cannot_be_is_one_error_before_any_engine(  # noqa: PLR0917 - fixtures
    kite: Kite,
    tiny_base: Path,
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    code: int,
    said: str,
):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    adapter(other / "credit", tiny_base, seed=3)
    zoo.defective(pair[0], other / "sibling", "wrong_base")
    (other / "empty").mkdir()
    places = {"CREDIT": str(pair[0]), "MOOD": str(pair[1]), "OTHER": str(other)}
    silent = f"http://127.0.0.1:{free_port()}"
    given = [silent if word == "SILENT" else replaced(word, places) for word in options]
    ended = kite("eval", "--base", tiny_base, *given)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert ended.err.count("error:") == 1


def replaced(word: str, places: Mapping[str, str]) -> str:
    for mark, place in places.items():
        word = word.replace(mark, place)
    return word


def test_every_bad_line_of_a_task_is_said_by_its_number(
    kite: Kite, tiny_base: Path, pair: tuple[Path, Path], tmp_path: Path
):
    private = "a private prompt"
    task = tmp_path / "bad.jsonl"
    bad = [
        json.dumps({"prompt": private, "answer": "y"}),
        "not json",
        "",
        json.dumps({"prompt": private}),
        json.dumps({"prompt": private, "answer": "yes"}),
        json.dumps({"prompt": private, "answer": "y", "answer_id": 3}),
        json.dumps({"prompt": private, "answer": "y", "answer_id": True}),
        json.dumps({"prompt": " ", "answer": "y"}),
        '{"prompt": "\\ud800", "answer": "y"}',
        "[" * 100_000,
    ]
    task.write_text("\n".join(bad))
    ended = kite("eval", "--blend", pair[0], "--base", tiny_base, "--task", task)
    assert ended.code == 1
    numbers = [line.partition(":")[2].partition(":")[0] for line in ended.err.splitlines() if "bad.jsonl:" in line]
    assert numbers[1:] == ["4", "5", "6", "7", "8", "9", "10"]
    assert "bad.jsonl:2: is no JSON" in ended.err
    assert "the answer 'yes' is 3 tokens of this base, not one" in ended.err
    assert private not in ended.err
    task.write_bytes(b"\xff")
    assert "bad.jsonl is not UTF-8" in kite("eval", "--blend", pair[0], "--base", tiny_base, "--task", task).err
    task.write_text("\n")
    assert "0 prompts" in kite("eval", "--blend", pair[0], "--base", tiny_base, "--task", task).err


def test_the_base_must_be_known(kite: Kite, pair: tuple[Path, Path]):
    ended = kite("eval", "--adapter-pair", *pair)
    assert (ended.code, "the base is not known" in ended.err) == (2, True)
