from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gateway.config import Settings, SettingsError, ShadowPolicy, load_settings
from gateway.core.baselines import BASELINES
from gateway.core.placement import POLICIES

pytestmark = pytest.mark.usefixtures("no_settings")


def write(text: str) -> None:
    Path("gateway.toml").write_text(text, encoding="utf-8")


def refusal(**given: object) -> str:
    with pytest.raises(SettingsError) as raised:
        load_settings(given)
    return str(raised.value)


def test_there_are_defaults_for_all() -> None:
    settings = load_settings({})
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.policy == "prefix_affinity"
    assert settings.max_body_bytes >= 32 << 20
    assert (settings.worker, settings.gpus, settings.max_num_seqs) == ([], None, None)
    assert settings.state_dir.is_absolute()


def test_flags_go_before_variables_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write('port = 1\npolicy = "least_work"\ndrain_seconds = 5\n')
    assert load_settings({}).port == 1
    monkeypatch.setenv("GATEWAY_PORT", "2")
    monkeypatch.setenv("GATEWAY_POLICY", "round_robin")
    assert load_settings({}).port == 2
    settings = load_settings({"port": "3"})
    assert (settings.port, settings.policy, settings.drain_seconds) == (3, "round_robin", 5.0)


def test_variables_are_read_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("gateway_port", "9")
    assert load_settings({}).port == 9


@pytest.mark.parametrize("value", ["http://a:1,http://b:2", " http://a:1 , http://b:2, "])
def test_lists_may_be_written_with_commas(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_WORKER", value)
    monkeypatch.setenv("GATEWAY_GPUS", "0, 2")
    settings = load_settings({})
    assert settings.worker == ["http://a:1", "http://b:2"]
    assert settings.gpus == [0, 2]


def test_lists_of_the_file_are_lists() -> None:
    write('worker = ["http://a:1", "https://b"]\ngpus = [1]\n')
    settings = load_settings({})
    assert (settings.worker, settings.gpus) == (["http://a:1", "https://b"], [1])


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("port", "http", "integer"),
        ("port", "65536", "65535"),
        ("port", "-1", "0"),
        ("policy", "random", "'prefix_affinity', 'least_work' or 'round_robin'"),
        ("max_num_seqs", "0", "greater than or equal to 1"),
        ("max_body_bytes", "1.5", "integer"),
        ("head_seconds", "0", "greater than 0"),
        ("idle_seconds", "soon", "number"),
        ("social_weight", "-1", "greater than or equal to 0"),
        ("worker", "localhost:8000", "http://"),
        ("worker", "http://a,http://a", "twice"),
        ("worker_kv_events", "tcp://a:1", "1 given for 0 workers"),
        ("worker_kv_events", "a:1", "is not tcp://HOST:PORT"),
        ("kv_events", "perhaps", "boolean"),
        ("gpus", "a", "integer"),
        ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_be_right(
    name: str, value: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = refusal(**{name: value})
    assert name in shown and right in shown
    monkeypatch.setenv(f"GATEWAY_{name.upper()}", value)
    assert refusal() == shown


def test_a_wrong_value_of_the_file_is_refused() -> None:
    write('port = "http"\nmax_num_seqs = 0\n')
    shown = refusal()
    assert "port" in shown and "max_num_seqs" in shown


@pytest.mark.parametrize(
    ("key", "meant"), [("max_num_seq", "max_num_seqs"), ("polcy", "policy"), ("workers", "worker")]
)
def test_an_unknown_key_is_refused_with_what_may_be_meant(key: str, meant: str) -> None:
    write(f"{key} = 5\n")
    assert refusal() == f"{key}: there is no such setting; did you mean {meant}?"


def test_an_unknown_variable_is_refused_with_what_may_be_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_MAX_NUM_SEQ", "5")
    assert refusal() == (
        "GATEWAY_MAX_NUM_SEQ: there is no such setting; did you mean GATEWAY_MAX_NUM_SEQS?"
    )


def test_what_is_like_nothing_is_refused_without_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_XYZZY", "1")
    write("qqqq = 1\n")
    assert refusal().splitlines() == [
        "GATEWAY_XYZZY: there is no such setting",
        "qqqq: there is no such setting",
    ]


def test_a_table_in_the_file_is_an_unknown_key() -> None:
    write("[gateway]\nport = 1\n")
    assert "gateway: there is no such setting" in refusal()


def test_variables_of_the_build_and_of_vllm_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_TORCH_INDEX", "http://index")
    monkeypatch.setenv("GATEWAY_GC_DIR", "/x")
    monkeypatch.setenv("MY_GATEWAY_PORT", "x")
    load_settings({})


@pytest.mark.parametrize("text", ["port = ", "port 5", '"', "port = 1\nport = 2\n"])
def test_a_file_that_is_not_toml_is_refused(text: str) -> None:
    write(text)
    assert refusal().startswith("gateway.toml: ")


def test_a_file_that_is_no_text_is_refused() -> None:
    Path("gateway.toml").write_bytes(b"host = '\xff\xfe'\n")
    assert refusal().startswith("gateway.toml: ")


def test_all_problems_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_PROT", "1")
    write("hots = 1\n")
    shown = refusal(port="x").splitlines()
    assert [line.split(":")[0].split(" ")[0] for line in sorted(shown)] == [
        "GATEWAY_PROT", "hots", "port",
    ]  # fmt: skip


def test_settings_do_not_change() -> None:
    settings = load_settings({})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 5  # type: ignore[misc]


def test_the_state_folder_follows_the_user_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/states")
    assert load_settings({}).state_dir == Path("/states/gateway")
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_settings({}).state_dir == Path("/home/someone/.local/state/gateway")


def test_each_setting_says_what_it_is() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_events_of_workers_are_given_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_WORKER", "http://a,http://b")
    monkeypatch.setenv("GATEWAY_WORKER_KV_EVENTS", "tcp://a:5557+5558, none")
    assert load_settings({}).worker_kv_events == ["tcp://a:5557+5558", "none"]
    assert load_settings({"kv_events": "off"}).kv_events is False


def test_every_shadow_policy_there_is_can_be_named() -> None:
    assert set(get_args(ShadowPolicy)) == (set(POLICIES) | set(BASELINES)) - {"llm_d_approximate"}
