#!/usr/bin/env bash
# Fuzzes every target for a fixed number of rounds; any crash, hang or excess of memory fails it.
#
#   fuzz/run-rounds.sh [ROUNDS [TARGET ...]]
#
# Needs a C++ compiler (for libFuzzer) and, for the sanitizer, a nightly toolchain if there is one. No cargo-fuzz.
# NTDB_FUZZ_SEED repeats a run; NTDB_FUZZ_SANITIZER=none does without AddressSanitizer. What a target died of is kept
# in fuzz/artifacts; run its program (the path is printed) with that file as the only argument to see it again.
set -eu
cd "$(dirname "$0")"

rounds=${1:-20000}
[ $# -gt 0 ] && shift
if [ $# -eq 0 ]; then
    set -- header_meta log_record log_scan log_stream bucket_page record shm_header attach_record cursor text changes \
        database salvage
fi
seed=${NTDB_FUZZ_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
echo "seed $seed; repeat with NTDB_FUZZ_SEED=$seed"

triple=$(rustc -vV | sed -n 's/^host: //p')
if cargo +nightly --version >/dev/null 2>&1; then
    cargo="cargo +nightly"
else
    # The flags are unstable; this compiler understands them when it is told that it may.
    export RUSTC_BOOTSTRAP=1
    cargo=cargo
fi
flags="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags="$flags -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags="$flags -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
if [ "${NTDB_FUZZ_SANITIZER:-address}" = address ]; then
    flags="$flags -Zsanitizer=address"
fi
target_dir=${NTDB_FUZZ_TARGET_DIR:-$PWD/target}
# With a target named, build scripts and macros are built without these flags.
RUSTFLAGS="$flags" CARGO_TARGET_DIR="$target_dir" $cargo build --quiet --release --target "$triple" --bins
programs="$target_dir/$triple/release"

work=$(mktemp -d "${NTDB_TEST_DIR:-/dev/shm}/ntdb-fuzz-XXXXXX")
trap 'rm -rf "$work"' EXIT
export NTDB_TEST_DIR="$work"
# Reserved addresses are no memory in use; and an ended child is none of the parent's leaks.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
mkdir -p artifacts corpus-work
"$programs/seeds" corpus-work

failed=""
for target in "$@"; do
    # A database takes a hundred times as long as a parser.
    case $target in
        changes | database | salvage) runs=$((rounds / 10)) ;;
        *) runs=$rounds ;;
    esac
    echo "== $target, $runs rounds"
    if ! "$programs/$target" -runs="$runs" -seed="$seed" -max_len=70000 -timeout=20 -rss_limit_mb=1024 \
        -print_final_stats=1 -artifact_prefix="artifacts/$target-" "corpus-work/$target" >"$work/said" 2>&1; then
        tail -n 60 "$work/said"
        failed="$failed $target"
    else
        grep -E "cov: .* DONE|stat::number_of_executed_units|stat::peak_rss_mb" "$work/said" || true
    fi
done
if [ -n "$failed" ]; then
    echo "FAILED:$failed (programs in $programs, inputs in fuzz/artifacts)"
    exit 1
fi
echo "all targets passed"
