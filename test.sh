#!/usr/bin/env bash
# Runs everything that proves ntdb: format and lints, documentation, unit and property tests, model
# checks, and the tests with real processes, kills, power cuts and damaged files.
#
# The long tests run as long as these variables say; the seed that repeats a failure is printed.
#   NTDB_TEST_SECONDS  seconds of the tests with many processes
#   NTDB_TEST_KILLS    number of kill -9
#   NTDB_TEST_SEEDS    number of simulated power cuts
#   NTDB_TEST_OPENS    number of processes that open, do one thing and exit
#   NTDB_FUZZ_ROUNDS   rounds of each fuzz target
set -euo pipefail
cd "$(dirname "$0")"
export NTDB_TEST_SECONDS="${NTDB_TEST_SECONDS:-60}"
export NTDB_TEST_KILLS="${NTDB_TEST_KILLS:-1000}"
export NTDB_TEST_SEEDS="${NTDB_TEST_SEEDS:-3000}"
export NTDB_TEST_OPENS="${NTDB_TEST_OPENS:-10000}"
export NTDB_FUZZ_ROUNDS="${NTDB_FUZZ_ROUNDS:-500}"

say() { printf '\n== %s\n' "$*"; }
# A test that hangs is ended, and fails, long before anybody's patience.
within() { timeout --kill-after=10 "$@"; }
fail() { printf 'test.sh: %s\n' "$*" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

missing=()
command -v strace > /dev/null || missing+=(strace)
command -v unshare > /dev/null || missing+=(util-linux)
command -v g++ > /dev/null || missing+=(g++)
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
for tool in cargo strace unshare g++; do
    command -v "$tool" > /dev/null || fail "$tool is needed and is not there"
done

say "format"
cargo fmt --all --check

say "lints"
cargo clippy --workspace --all-targets --all-features -- -D warnings

say "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items

say "unit tests, property tests, model checks, examples"
cargo test -p ntdb -p ntdb-proof -p ntdb-workload -p ntdb-cli --no-run
within $((1200 + NTDB_TEST_SECONDS)) cargo test -p ntdb -p ntdb-proof -p ntdb-workload -p ntdb-cli
for example in counter words iterate replicate; do
    cargo run --quiet --release -p ntdb --example "$example"
done

say "real processes: $NTDB_TEST_SECONDS s of traffic, $NTDB_TEST_KILLS kills," \
    "$NTDB_TEST_SEEDS power cuts, $NTDB_TEST_OPENS short-lived processes"
# One test at a time: each uses all processors and judges how long somebody waits.
cargo test -p ntdb-testkit --no-run
within $((1500 + 20 * NTDB_TEST_SECONDS)) cargo test -p ntdb-testkit -- --test-threads=1 --nocapture

say "fuzz targets: $NTDB_FUZZ_ROUNDS rounds each"
fuzz/run-rounds.sh "$NTDB_FUZZ_ROUNDS"

say "all tests have passed"
