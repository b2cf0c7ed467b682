#!/usr/bin/env bash
# Everything that needs a CUDA device, from a checkout, without an installation:
#
#   bash benchmarks/gpu_suite.sh [RESULTS_FOLDER] [STAGE...]
#
#   suite      the tests of the whole tree on all backends (all of tests/ but tests/gpu)
#   gpu        tests/gpu: streams, graphs, copies, consumers, traces
#   bench      benchmarks/ with timing on; RESULTS_FOLDER/benchmarks.json
#   sanitizer  compute-sanitizer's memcheck and racecheck over a shortened selection
#
# Stages: all four where none is named. RESULTS_FOLDER: results where none is given; each stage's log goes
# there. The exit status is 1 where a stage failed, 2 where nothing can run. Settings, by environment:
#
#   PYTHON                the interpreter (python3); it needs NumPy, Numba, CuPy, pytest, Hypothesis
#   WORKERS               processes of the stage suite, with pytest-xdist (8 where it is installed)
#   BENCHMARKS            files of the stage bench (benchmarks)
#   SANITIZER_TOOLS       "memcheck racecheck"
#   SANITIZER_LIMIT_S     seconds for each of them (420)
#   PAGEDKV_TRACES        folder of the real traces; without them their tests are skipped
#   PYTEST_ADDOPTS        further options of every pytest run
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

results=results
stages=()
for argument in "$@"; do
  case $argument in
    suite | gpu | bench | sanitizer) stages+=("$argument") ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) results=$argument ;;
  esac
done
[ "${#stages[@]}" -gt 0 ] || stages=(suite gpu bench sanitizer)
mkdir -p "$results" || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset PAGEDKV_BACKEND

"$python" - <<'PY' | tee "$results/machine.txt" || { echo "no stage was run: the above is missing"; exit 2; }
import importlib.metadata as meta
import sys

from pagedkv.backends import why_unavailable

reasons = {name: why_unavailable(name) for name in ("cupy", "numba")}
for name, reason in reasons.items():
    if reason:
        print(f"backend {name}: {reason}")
if reasons["cupy"]:
    sys.exit(1)
from cupy.cuda import runtime

for device in range(runtime.getDeviceCount()):
    print(f"device {device}: {runtime.getDeviceProperties(device)['name'].decode()}")
packages = ("numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "torch", "jax", "pytest", "hypothesis")
found = {}
for dist in meta.distributions():  # the first on the path is the one that is imported
    found.setdefault(dist.metadata["Name"], dist.version)
versions = [f"{name} {found[name]}" for name in packages if name in found]
print(f"driver {runtime.driverGetVersion()}, Python {sys.version.split()[0]},", ", ".join(versions))
PY

run_pytest() { "$python" -m pytest -q -p no:cacheprovider "$@"; }

run_suite() {
  local workers=()
  if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "${WORKERS:-8}"); fi
  run_pytest "${workers[@]}" tests --ignore=tests/gpu
}

run_gpu() { run_pytest --durations=10 tests/gpu; }

run_bench() {
  # shellcheck disable=SC2086 # several files may be named
  run_pytest ${BENCHMARKS:-benchmarks} --benchmark-enable --benchmark-json="$results/benchmarks.json" || return 1
  "$python" - "$results/benchmarks.json" <<'PY'
import json
import sys

for bench in json.load(open(sys.argv[1]))["benchmarks"]:
    extra = ", ".join(f"{key} {value}" for key, value in bench["extra_info"].items())
    print(f"{bench['name']}: median {1e6 * bench['stats']['median']:.2f} us; {extra}"[:400])
PY
}

# Every array has its own allocation (tests.gpu.no_pool), so that memcheck sees where it ends. Left out:
# stalled streams (they skip themselves), profilers, other processes, and what waits for nothing but time.
run_sanitizer() {
  local tool status=0
  command -v compute-sanitizer >/dev/null || PATH=$PATH:/usr/local/cuda/bin
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not installed (it comes with the CUDA toolkit)"
    return 1
  fi
  for tool in ${SANITIZER_TOOLS:-memcheck racecheck}; do
    echo "== compute-sanitizer --tool $tool"
    local selection=(tests/kernels)
    if [ "$tool" = memcheck ]; then
      selection+=(tests/tables tests/gpu --ignore=tests/gpu/test_stalled_stream.py --ignore=tests/gpu/test_replay.py
        --ignore=tests/gpu/test_dlpack.py --ignore=tests/gpu/test_device_work.py)
    fi
    PAGEDKV_KERNEL_FORMS="cupy numba" PAGEDKV_KERNEL_EXAMPLES=8 PAGEDKV_TABLE_EXAMPLES=5 PAGEDKV_UNDER_SANITIZER=1 \
      timeout --signal=INT --kill-after=20 "${SANITIZER_LIMIT_S:-420}" \
      compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
      "$python" -m pytest -q -p no:cacheprovider -p tests.gpu.no_pool -m gpu "${selection[@]}"
    local code=$?
    case $code in
      0) echo "== $tool: clean" ;;
      9) echo "== $tool: errors were found"; status=1 ;;
      124 | 137) echo "== $tool: did not finish in ${SANITIZER_LIMIT_S:-420} s"; status=1 ;;
      *) echo "== $tool: exit status $code"; status=1 ;;
    esac
  done
  return "$status"
}

failed=0
summary=()
for stage in "${stages[@]}"; do
  printf '\n==== %s\n' "$stage"
  began=$SECONDS
  "run_$stage" 2>&1 | tee "$results/$stage.log"
  code=${PIPESTATUS[0]}
  outcome=passed
  [ "$code" -eq 0 ] || { outcome="FAILED ($code)"; failed=1; }
  counted=$(grep -E '^=* ?[0-9]+ (passed|failed|skipped|error)|^== (memcheck|racecheck|synccheck|initcheck):' \
    "$results/$stage.log" | tr '\n' ' ')
  summary+=("$(printf '%-10s %-11s %4d s  %s' "$stage" "$outcome" $((SECONDS - began)) "$counted")")
done
printf '\n==== summary\n'
cat "$results/machine.txt"
printf '%s\n' "${summary[@]}" | tee "$results/summary.txt"
exit "$failed"
