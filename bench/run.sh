#!/usr/bin/env bash
# Compares ntdb with other databases on this machine: installs what is needed (Debian's packages of TDB, Berkeley DB, RocksDB and
# PostgreSQL; the others are built from their crates), measures all of them in turn, and writes Markdown tables and plots.
#
#   bench/run.sh [OUTPUT]     default: bench/results
#
# The databases are made in COMPARE_DIR (default: a folder in $TMPDIR or /tmp). Takes about an hour on two processors;
# COMPARE_QUICK=1 takes some minutes, for whoever only wants to know whether it runs.
set -euo pipefail
cd "$(dirname "$0")"
out=$(realpath -m "${1:-results}")
dir="${COMPARE_DIR:-$(mktemp -d)}"
trap '[ -n "${COMPARE_DIR:-}" ] || rm -rf "$dir"' EXIT
# A server runs as somebody else, who must be able to reach its folder.
chmod a+rx "$dir"

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
packages=(libtdb-dev libdb5.3-dev librocksdb-dev postgresql-15)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "installing ${missing[*]}" >&2
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
version() { dpkg-query -W -f '${Version}' "$1" | sed 's/^.*://; s/[+-].*//'; }
TDB_VERSION=$(version libtdb-dev)
ROCKSDB_VERSION=$(version librocksdb-dev)
export TDB_VERSION ROCKSDB_VERSION

cargo build --release
compare="${CARGO_TARGET_DIR:-target}/release/compare"

if [ -n "${COMPARE_QUICK:-}" ]; then
    runs=1 records=1000,10000 at_most=0.5 clients=1,4 transactions=50 seconds=0.2 many=2000
else
    runs=3 records=100,1000,10000,100000,1000000 at_most=5 clients=1,4,16 transactions=500 seconds=1 many=25000
fi
mkdir -p "$out"
rm -f "$out/results.jsonl"
common=(--dir "$dir" --runs "$runs" --results "$out/results.jsonl")
{
    "$compare" speed "${common[@]}" --records "$records" --at-most "$at_most"
    "$compare" tpcb "${common[@]}" --clients "$clients" --transactions "$transactions"
    "$compare" scale "${common[@]}" --seconds "$seconds"
    "$compare" properties "${common[@]}" --transactions "$many"
} | tee "$out/results.md"
"$compare" plot "$out/results.jsonl" "$out"
echo "written: $out/results.md, and plots beside it" >&2
