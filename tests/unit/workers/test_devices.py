from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.workers.devices import DeviceError, core_shares, select_gpus, split, visible_gpus

TORCH = """
import os
class cuda:
    device_count = staticmethod(lambda: int(os.environ["GPUS_OF_THE_FAKE"]))
"""


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """An environment with an NVIDIA driver's tool and a PyTorch that counts as it is told."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    (tmp_path / "torch.py").write_text(TORCH)
    return {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}


def test_gpus_are_counted_by_pytorch(driver: dict[str, str]) -> None:
    assert visible_gpus({**driver, "GPUS_OF_THE_FAKE": "3"}) == ("0", "1", "2")
    assert visible_gpus({**driver, "GPUS_OF_THE_FAKE": "0"}) == ()


def test_gpus_keep_the_names_that_the_user_made_visible(driver: dict[str, str]) -> None:
    told = {**driver, "CUDA_VISIBLE_DEVICES": "7, GPU-5f, -1"}
    assert visible_gpus({**told, "GPUS_OF_THE_FAKE": "2"}) == ("7", "GPU-5f")


def test_a_pytorch_that_cannot_be_asked_is_an_error_that_says_why(driver: dict[str, str]) -> None:
    with pytest.raises(DeviceError, match="GPUS_OF_THE_FAKE"):
        visible_gpus(driver)


@pytest.mark.parametrize(("wanted", "chosen"), [([0], ("a",)), ([2, 0], ("c", "a")), ([], ())])
def test_gpus_are_selected_by_position(wanted: list[int], chosen: tuple[str, ...]) -> None:
    assert select_gpus(["a", "b", "c"], wanted) == chosen


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([0, 3], "--gpus 0,3: no GPU 3; there is 0 to 2"),
        ([-1], "no GPU -1"),
        ([1, 1], "--gpus 1,1: a GPU can serve one worker only"),
    ],
)
def test_gpus_that_cannot_be_selected(wanted: list[int], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        select_gpus(["a", "b", "c"], wanted)


def test_no_gpus_to_select() -> None:
    with pytest.raises(DeviceError, match="no GPU 0; there is none"):
        select_gpus([], [0])


def test_cpu_workers_share_the_allowed_cores_without_overlap() -> None:
    allowed = os.sched_getaffinity(0)
    for workers in range(1, len(allowed) + 1):
        shares = core_shares(workers)
        ids = [cpu for share in shares for cpu in share]
        assert len(shares) == workers
        assert all(shares)
        assert len(set(ids)) == len(ids)
        assert set(ids) <= allowed


def test_more_cpu_workers_than_cores() -> None:
    allowed = os.sched_getaffinity(0)
    shares = core_shares(2 * len(allowed))
    assert len(shares) == 2 * len(allowed)
    assert {cpu for share in shares for cpu in share} <= allowed


def test_split_is_even_and_keeps_neighbours_together() -> None:
    assert split(range(7), 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert split("abcd", 2) == [["a", "b"], ["c", "d"]]
