"""Options of the command line: their defaults, their syntax and what they refuse."""

import argparse

import pytest

from pagedkv.replay.argument_types import memory_size
from pagedkv.replay.arguments import add_replay_arguments, options_from
from pagedkv.replay.errors import ReplayInputError
from pagedkv.replay.options import ReplayOptions
from pagedkv.specs import ContextParallel, KVCacheGroupSpec


def parsed(*argv):
    parser = argparse.ArgumentParser()
    add_replay_arguments(parser)
    return options_from(parser, parser.parse_args(argv))


def test_without_arguments_the_defaults_hold():
    options = parsed()

    assert options == ReplayOptions()
    assert (options.max_num_seqs, options.max_num_batched_tokens) == (256, 8192)
    assert (options.step_ms, options.token_us, options.arrivals) == (10, 20, "trace")
    assert options.groups == (KVCacheGroupSpec(16),)
    assert options.resolved_num_blocks() == 32_768  # 64 GiB of 16 x 128 KiB


ALL_OPTIONS = """
    t.gz --arrivals immediate --step-ms 0.5 --token-us 0 --block-size 8 --num-blocks 9 --kv-memory 1M
    --bytes-per-token 4 --watermark 0.5 --max-model-len 7 --max-num-seqs 3 --max-num-batched-tokens 5
    --cp-world-size 2 --cp-interleave 4 --backend numpy --limit 6 --seed 2 --no-verify --samples 1
    --skip-invalid --json j --plot p --quiet --no-prefix-caching --hash sha256 --compact-every 7
"""


def test_every_option_arrives():
    options = parsed(*ALL_OPTIONS.split())

    assert options == ReplayOptions(
        trace="t.gz",
        arrivals="immediate",
        step_ms=0.5,
        token_us=0.0,
        num_blocks=9,
        kv_memory=1 << 20,
        bytes_per_token=4,
        max_model_len=7,
        max_num_seqs=3,
        max_num_batched_tokens=5,
        groups=(KVCacheGroupSpec(8),),
        context_parallel=ContextParallel(2, 0, 4),
        backend="numpy",
        limit=6,
        seed=2,
        verify=False,
        num_samples=1,
        watermark=0.5,
        skip_invalid=True,
        json="j",
        plot="p",
        quiet=True,
        prefix_caching=False,
        hash="sha256",
        compact_every=7,
    )
    assert options.resolved_num_blocks() == 9


def test_groups_have_windows_block_sizes_and_views():
    options = parsed("--groups", "full,window:4096/32+replicated, full/48", "--kernel-views", "8,4:20")

    views = (8, (4, 20))
    assert options.groups == (
        KVCacheGroupSpec(16, kernel_views=views),
        KVCacheGroupSpec(32, kernel_views=views, cp_sharded=False, sliding_window=4096),
        KVCacheGroupSpec(48, kernel_views=views),
    )


def test_the_budget_counts_a_groups_share_of_a_token():
    options = parsed("--groups", "full,window:9", "--kv-memory", "1GiB", "--bytes-per-token", "1024")

    assert options.resolved_num_blocks() == (1 << 30) * 2 // (16 * 1024)


def test_a_budget_without_a_block_is_refused():
    with pytest.raises(
        ReplayInputError, match=r"--kv-memory must hold at least 2 blocks of 16 tokens x 131072"
    ):
        parsed("--kv-memory", "2M").resolved_num_blocks()


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("2k", 2048), ("3MiB", 3 << 20), ("64GiB", 64 << 30), ("1t", 1 << 40), ("5b", 5)],
)
def test_sizes(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--block-size 0", "--block-size: must be an integer in [1, 2147483647], got '0'"),
        ("--block-size -4", "--block-size: "),
        ("--num-blocks 1", "--num-blocks: must be an integer in [2, 2147483647]"),
        ("--num-blocks 9999999999", "got '9999999999'"),
        ("--limit 0", "--limit: must be"),
        ("--limit 1.5", "--limit: must be"),
        ("--seed -1", "--seed: "),
        ("--step-ms nan", "--step-ms: must be a number of at least 0, got 'nan'"),
        ("--token-us inf", "--token-us: must be a number"),
        ("--step-ms=-1", "--step-ms: must be a number"),
        ("--watermark 1", "--watermark: must be below 1, got '1'"),
        ("--kv-memory 64XB", "--kv-memory: must be bytes or a size such as 64GiB, got '64XB'"),
        ("--kv-memory G", "--kv-memory: must be bytes"),
        ("--arrivals never", "invalid choice: 'never'"),
        ("--backend torch", "invalid choice: 'torch'"),
        ("--groups half", "--groups must list full or window:TOKENS[/BLOCK_SIZE][+replicated], got 'half'"),
        ("--groups full,", "got ''"),
        ("--groups window", "got 'window'"),
        ("--groups full/x", "got 'full/x'"),
        ("--groups full+sharded", "got 'full+sharded'"),
        ("--groups window:0", "sliding_window must lie in"),
        ("--groups full/0", "block_size must lie in"),
        ("--kernel-views 5", "must divide block_size 16, got 5"),
        ("--kernel-views 4:2", "kernel view stride must be at least the ratio 4, got 2"),
        ("--kernel-views 4:", "--kernel-views: must list SIZE or SIZE:STRIDE, got '4:'"),
        ("--cp-world-size 2 --cp-interleave 3", "interleave must divide block_size 16, got 3"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_bad_options_end_with_status_2_and_a_reason(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(*argv.split(" "))

    assert caught.value.code == 2
    assert message in capsys.readouterr().err
