"""Which process sees which GPU: every number of GPUs, every kind of mask, worked out without one."""

import itertools

import pytest

from runtime import placement
from runtime.placement import Gpu, Place, describe, devices, installed_gpus, parse_gpus, plan, smallest

GIB = 2**30
UUIDS = [f"GPU-{i:08x}-1111-2222-3333-444455556666" for i in range(16)]
MIGS = [f"MIG-{i:08x}-1111-2222-3333-444455556666" for i in range(7)]


@pytest.mark.parametrize(
    "present, mask, want",
    [
        (3, None, ["0", "1", "2"]),
        (0, None, []),
        (3, "", []),
        (3, "-1", []),
        (3, "2,0", ["2", "0"]),
        (3, " 2 , 0", ["2", "0"]),
        (3, "02", ["2"]),
        (3, "0,-1,1", ["0"]),  # CUDA stops there
        (3, "0,3,1", ["0"]),  # no such device
        (3, "0,,1", ["0"]),
        (3, "0,1,0", []),  # twice: CUDA shows none
        (3, "0,all", ["0"]),
        (0, "0", []),
        (0, UUIDS[0], []),
        (3, ",".join(UUIDS[:2]), UUIDS[:2]),
        (3, f"GPU-abc,1,{UUIDS[2]}", ["GPU-abc", "1", UUIDS[2]]),  # a UUID may be shortened
        (1, ",".join(MIGS[:3]), MIGS[:3]),  # several instances of one GPU
    ],
)
def test_devices_are_named_as_cuda_reads_a_mask(present, mask, want):
    assert devices(present, mask) == want


@pytest.mark.parametrize("searchers", range(4))
def test_without_gpus_nothing_is_visible(searchers):
    for names in ([], ["0", "1"], UUIDS):  # also where there are some
        assert plan(names, 0, searchers) == [Place("", "cpu", True)] * (1 + searchers)


SOURCES = {  # name -> (GPUs present, mask)
    "no mask": (16, None),
    "numbers": (16, ",".join(map(str, reversed(range(16))))),
    "UUIDs": (16, ",".join(UUIDS)),
    "a mix": (16, ",".join(name for pair in zip(UUIDS[:8], map(str, range(8, 16)), strict=True) for name in pair)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("gpus", range(1, 17))
def test_every_process_has_its_own_device_first_and_sees_the_trainers(source, gpus):
    names = devices(*SOURCES[source])
    assert len(names) == 16
    for searchers in range(max(2, gpus)):
        places = plan(names, gpus, searchers)
        assert len(places) == 1 + searchers
        trainer, *others = places
        assert trainer == Place(names[0], "cuda", True)
        for i, place in enumerate(others):
            seen = place.visible.split(",")
            assert place.device == "cuda" and place.sees_trainer and names[0] in seen
            assert seen == ([names[0]] if gpus == 1 else [names[1 + i], names[0]])
        own = [p.visible.split(",")[0] for p in places]
        assert len(set(own)) == (1 if gpus == 1 else len(own))  # nobody else's device, but for one shared by all
        assert set(own) <= set(names[:gpus])  # within what was asked for


@pytest.mark.parametrize("gpus", range(2, 8))
def test_a_mig_instance_is_all_that_a_process_sees(gpus):
    names = devices(1, ",".join(MIGS))
    places = plan(names, gpus, gpus - 1)
    assert [p.visible for p in places] == MIGS[:gpus]
    assert [p.sees_trainer for p in places] == [True] + [False] * (gpus - 1)
    mixed = plan([UUIDS[0], MIGS[0]], 2, 1)
    assert mixed[1] == Place(MIGS[0], "cuda", False)
    shared = plan([MIGS[0]], 1, 1)
    assert shared == [Place(MIGS[0], "cuda", True)] * 2


def test_what_can_not_be_placed_is_refused():
    for present, gpus in itertools.product(range(4), range(6)):
        names = devices(present, None)
        if gpus > present:
            with pytest.raises(ValueError, match=f"{gpus} GPUs wanted of {present}"):
                plan(names, gpus, 1)
        elif gpus > 1:
            with pytest.raises(ValueError, match="searchers on"):
                plan(names, gpus, gpus)


def test_the_plan_in_words():
    assert describe(plan(["0", "1"], 2, 1)) == [
        "trainer: GPU 0 (CUDA_VISIBLE_DEVICES=0)",
        "searcher-0: GPU 1 (CUDA_VISIBLE_DEVICES=1,0)",
    ]
    assert describe(plan([], 0, 1)) == ["trainer: CPU", "searcher-0: CPU"]


# --- the machine ----------------------------------------------------------------------------------------------------

SMI = """0, GPU-aaaa1111, NVIDIA A, 24576
1, GPU-bbbb2222, NVIDIA B, 81920
2, GPU-cccc3333, NVIDIA C, [N/A]
"""


def test_nvidia_smis_lines_are_read():
    gpus = parse_gpus(SMI)
    assert gpus == [Gpu(0, "GPU-aaaa1111", "NVIDIA A", 24 * GIB), Gpu(1, "GPU-bbbb2222", "NVIDIA B", 80 * GIB)]
    assert parse_gpus("") == parse_gpus("NVIDIA-SMI has failed because ...") == []


@pytest.mark.parametrize(
    "names, want",
    [
        (["0"], 24),  # CUDA may count otherwise: the smallest of all
        (["1"], 24),
        (["GPU-bbbb"], 80),
        (["GPU-bbbb2222", "GPU-aaaa"], 24),
        (["MIG-1"], None),
        (["GPU-cccc3333"], None),
        ([], None),
    ],
)
def test_the_smallest_gpu_counts(names, want):
    assert smallest(parse_gpus(SMI), names) == (want and want * GIB)


def test_a_machine_without_nvidia_smi_knows_nothing(monkeypatch):
    monkeypatch.setattr(placement.shutil, "which", lambda _: None)
    assert installed_gpus() == []
