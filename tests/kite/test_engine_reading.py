"""The pure part of the port: command lines, texts of refusals and deaths, answers."""

import math

import pytest

from kite.engine import Activity, Death, Distribution, EngineAnswer, EngineSpec, Refusal, command
from kite.engine.command import environment
from kite.engine.errors import death, refusal
from kite.engine.reading import checked, complete, named, nats, read_activity, read_distribution, token_id, words

SPEC = EngineSpec(
    kind="vllm",
    base_path="/models/base",
    served_name="base",
    dtype="bfloat16",
    max_model_len=512,
    max_loras=6,
    max_lora_rank=16,
    block_size=32,
    kv_cache_bytes=2**30,
    cpus="1",
)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_vllm_is_started_on_loopback_with_equal_lora_pools() -> None:
    argv, env = command(SPEC, 8123)
    assert option(argv, "--host") == "127.0.0.1"
    assert option(argv, "--port") == "8123"
    assert option(argv, "--max-loras") == option(argv, "--max-cpu-loras") == "6"
    assert option(argv, "--block-size") == "32"
    assert option(argv, "--kv-cache-memory-bytes") == str(2**30)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert (env["VLLM_SERVER_DEV_MODE"], env["VLLM_NO_USAGE_STATS"], env["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert "--enable-sleep-mode" not in argv, "vLLM refuses it on a CPU"
    assert "--otlp-traces-endpoint" not in argv
    assert not any(name.startswith("OTEL") for name in env)


def test_a_collector_is_told_over_http_with_the_callers_trace() -> None:
    argv, env = command(SPEC, 8123, otlp_endpoint="http://127.0.0.1:4318/", traceparent="00-aa-bb-01")
    assert option(argv, "--otlp-traces-endpoint") == "http://127.0.0.1:4318/v1/traces"
    assert env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert env["TRACEPARENT"] == "00-aa-bb-01"


def test_on_a_gpu_nothing_of_the_cpu_is_set() -> None:
    argv, env = command(SPEC.model_copy(update={"cpus": ""}), 8123)
    assert "--enable-sleep-mode" in argv
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE"} & env.keys()


def test_inherited_memory_setting_does_not_override_the_exact_one() -> None:
    assert environment({"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "40"}, {"A": "1"}) == {"PATH": "/bin", "A": "1"}


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (400, "The lora adapter 'a' has already been loaded. If you want to load", Refusal.ALREADY_LOADED),
        (400, "The lora adapter 'a' conflicts with a served base model.", Refusal.NAME_IS_BASE),
        (404, "Loading lora a failed: No adapter found for /x", Refusal.ADAPTER_MISSING),
        (404, "The lora adapter 'a' cannot be found.", Refusal.MODEL_UNKNOWN),
        (404, "The model `a` does not exist.", Refusal.MODEL_UNKNOWN),
        (500, "Worker failed with error 'LoRA rank 32 is greater than max_lora_rank 16.'", Refusal.RANK_TOO_HIGH),
        (500, "Worker failed with error 'vLLM does not yet support DoRA.'", Refusal.UNSUPPORTED),
        (500, "While loading /x, expected target modules in {'q_proj'}", Refusal.MODULES_UNEXPECTED),
        (500, "The size of tensor a (128) must match the size of tensor b (256)", Refusal.MALFORMED),
        (400, "Out of range float values are not JSON compliant", Refusal.NOT_FINITE),
        (404, "Not Found", Refusal.NOT_OFFERED),
        (503, "", Refusal.DEAD),
        (429, "", Refusal.BUSY),
        (500, "", Refusal.SILENT),
        (500, "something new", Refusal.OTHER),
    ],
)
def test_refusals_have_stable_reasons(status: int, text: str, reason: Refusal) -> None:
    assert refusal(status, text) is reason


def test_the_cause_of_a_death_is_found_above_its_consequences() -> None:
    tail = (
        "(EngineCore pid=7) ERROR [core.py:1] ValueError: Available memory on node 0 is less than requested memory\n"
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    reason, sentence = death(1, tail)
    assert reason is Death.OUT_OF_MEMORY
    assert sentence.startswith("ValueError: Available memory")


@pytest.mark.parametrize(
    ("code", "tail", "reason"),
    [
        (1, "/usr/bin/python: Error while finding module: No module named 'vllm'", Death.NOT_INSTALLED),
        (1, "ModuleNotFoundError: No module named 'vllm'", Death.NOT_INSTALLED),
        (1, "OSError: [Errno 98] Address already in use", Death.PORT_TAKEN),
        (2, "entry.py: error: unrecognized arguments: --block-sizes", Death.BAD_OPTION),
        (-9, "", Death.SIGNALLED),
        (1, "nothing said", Death.OTHER),
    ],
)
def test_deaths_have_stable_reasons(code: int, tail: str, reason: Death) -> None:
    assert death(code, tail)[0] is reason


def test_words_come_out_of_every_form_of_error() -> None:
    assert words('{"error": {"message": "no"}}') == "no"
    assert words('{"error": "no"}') == "no"
    assert words('{"detail": "Not Found"}') == "Not Found"
    assert words("plain") == "plain"


def answer(pairs: dict[str, object]) -> object:
    return {"choices": [{"logprobs": {"top_logprobs": [pairs]}}]}


def test_a_distribution_is_read_by_token_id() -> None:
    found = read_distribution(answer({"token_id:9": -0.5, "token_id:2": -1.0}))
    assert found == {2: -1.0, 9: -0.5}
    assert Distribution(found).mass == pytest.approx(math.exp(-0.5) + math.exp(-1.0))


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        answer({}),
        answer({" word": -1.0}),
        answer({"token_id:1": math.nan}),
        answer({"token_id:1": "-1"}),
        answer({"token_id:1": -0.1, "token_id:2": -0.1}),
        [],
        None,
    ],
)
def test_what_is_no_distribution_is_an_error(bad: object) -> None:
    with pytest.raises(EngineAnswer):
        read_distribution(bad)


def test_padding_of_a_mixed_batch_is_seen() -> None:
    spoilt = {1583: -3.0, 0: -9999.0}
    assert not complete(spoilt, 20)
    assert named(spoilt, [0, 1583]) is None
    assert named({1: -1.0, 2: -2.0, 3: -3.0}, [2]) == {2: -2.0}


def test_a_page_of_metrics_gives_activity() -> None:
    page = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
    )
    assert read_activity(page) == Activity(running=3, waiting=4)
    with pytest.raises(EngineAnswer):
        read_activity("")


def test_numbers_and_tokens_are_checked() -> None:
    assert token_id("token_id:17") == 17
    for bad in ("17", "token_id:", "token_id:-1"):
        with pytest.raises(EngineAnswer):
            token_id(bad)
    for value in (None, True, math.inf):
        with pytest.raises(EngineAnswer):
            nats(value)
    with pytest.raises(EngineAnswer):
        checked({})
