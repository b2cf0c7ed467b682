"""Several tables on one device, several tables on one mirror, and tables on two devices."""

import numpy as np
import pytest

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.backends import why_unavailable

from .pairs import Decoding, Keeper, assert_same, values_of

pytestmark = pytest.mark.gpu


def test_tables_on_one_device_do_not_disturb_one_another(gpu_backend, cupy, stream):
    """One runs on the legacy default stream, one on a stream of its own, in turns and with growth."""
    second = "cupy" if why_unavailable("numba") else "numba"
    pairs = [Decoding(gpu_backend), Decoding("cupy", staging_depth=1), Decoding(second, staging_depth=2)]
    streams = [stream, None, cupy.cuda.Stream(non_blocking=True)]
    last = [None] * 3
    for i in range(30):
        which = (i * i) % 3 if i % 4 else i % 3
        pair = pairs[which]
        if i == 15:
            for p in pairs:
                p.do("append_row", (np.arange(1, 1500), np.arange(1, 700)), 3)
        last[which] = pair.step(streams[which])
    cupy.cuda.runtime.deviceSynchronize()
    for which, (expected, step) in enumerate(last):
        assert_same(expected, values_of(step, pairs[which].device), f"table {which}")


def test_one_mirror_committed_by_several_tables(gpu_backend, stream):
    """Two context-parallel ranks, two backends, both kinds of rows: each sends what it has not sent yet."""
    groups = [KVCacheGroupSpec(4, (2,)), KVCacheGroupSpec(8, cp_sharded=False)]
    tables = []
    for backend in ("numpy", gpu_backend):
        for rank, stable_rows in ((0, False), (1, False), (1, True)):
            tables.append(
                MultiGroupBlockTable(
                    groups,
                    6,
                    512,
                    64,
                    context_parallel=ContextParallel(2, rank, 2),
                    stable_rows=stable_rows,
                    backend=backend,
                    mirror=tables[0].mirror if tables else None,
                )
            )
    rng, mirror = np.random.default_rng(5), tables[0].mirror
    starts = np.arange(0, 13, 2, dtype=np.int32)
    for i in range(60):
        row = int(rng.integers(6))
        mirror.append_rows([row], [[1], [2]], rng.integers(1, 1000, 3).astype(np.int32))
        if i % 6 == 5:
            mirror.clear_rows([row])
        if i % 9 == 8:
            mirror.move_rows([row], [(row + 1) % 6])
        computed = rng.integers(0, 60, 6).astype(np.int32)
        for which in range(3):
            if (i + which) % (which + 2):  # each at its own pace, and with its own dirty ranges
                continue
            rows = {"rows": rng.integers(-1, 6, 6).astype(np.int32)} if which == 2 else {}
            host, device = tables[which], tables[which + 3]
            expected = values_of(host.commit(6, starts, computed, **rows), host)
            step = device.commit(6, starts, computed, **rows, stream=stream)
            stream.synchronize()
            assert_same(expected, values_of(step, device), f"step {i} of table {which}")
            for group in range(2):
                actual = device[group].get_device_tensor(6).get()
                np.testing.assert_array_equal(mirror.block_table(group), actual)


@pytest.fixture
def second_device(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    return 1


def test_a_table_on_another_device_than_the_current_one(gpu_backend, cupy, second_device):
    pairs = [Decoding(gpu_backend, device=device) for device in (0, second_device)]
    with cupy.cuda.Device(second_device):
        far = cupy.cuda.Stream(non_blocking=True)
    near = cupy.cuda.Stream(non_blocking=True)
    for i in range(40):
        for pair, stream in zip(pairs, (near, far), strict=True):
            current = (i // 10) % 2
            with cupy.cuda.Device(current):
                expected, step = pair.step(stream)
                assert cupy.cuda.runtime.getDevice() == current, "the current device is the caller's"
            stream.synchronize()
            assert step.seq_lens.device.id == pair.device.device
            assert_same(expected, values_of(step, pair.device), f"step {i} on device {pair.device.device}")


def test_the_current_stream_is_that_of_the_tables_device(gpu_backend, cupy, second_device):
    pair = Decoding(gpu_backend, device=second_device)
    with cupy.cuda.Device(second_device):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(6):
                expected, step = pair.step()
            keeper = Keeper(step, pair.device)
            keeper.keep(step, pair.device, stream)
            stream.synchronize()
            assert_same(expected, keeper.values())


def test_an_array_of_another_device_is_refused(gpu_backend, cupy, second_device):
    pair = Decoding(gpu_backend, device=0)
    with cupy.cuda.Device(second_device):
        computed = cupy.zeros(8, np.int32)
    with pytest.raises(TypeError, match="device arrays must lie on the table's device 0, got device 1"):
        pair.device.commit(8, np.arange(9, dtype=np.int32), computed)
