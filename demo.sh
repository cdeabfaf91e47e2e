#!/usr/bin/env bash
# Shows at work what ntdb is for, on real data: four processes fill one database at the same time,
# one of them is killed with SIGKILL and replaced, another process reads all the while, and nothing
# is lost. Ends with a status other than 0 if anything is wrong.
#
#   ./demo.sh [DIRECTORY]     the database is made there; default: a temporary directory, removed
set -euo pipefail
[ $# -eq 0 ] || set -- "$(realpath -m -- "$1")"
cd "$(dirname "$0")"

data=/usr/share/unicode/UnicodeData.txt
say() { printf '\n== %s\n' "$*"; }
fail() { printf 'demo.sh: %s\n' "$*" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

if [ ! -r "$data" ]; then
    say "installing Debian's package unicode-data, the data set"
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends unicode-data
fi
[ -r "$data" ] || fail "$data is not there; install the package unicode-data"

say "building (release)"
cargo build --release --quiet -p ntdb-cli
ntdb="${CARGO_TARGET_DIR:-target}/release/ntdb"

if [ $# -gt 0 ]; then
    dir=$1
    mkdir -p "$dir"
else
    dir=$(mktemp -d)
fi
reader=
clean_up() {
    [ -z "$reader" ] || kill "$reader" 2>/dev/null || true
    [ $# -gt 0 ] || rm -rf "$dir"
}
trap 'clean_up "$@"' EXIT
db="$dir/unicode.ntdb"
"$ntdb" create "$db"

lines=$(wc -l < "$data")
# Look-ups to be made: keys from all over the file, each with its line.
awk 'NR % 97 == 1' "$data" > "$dir/samples"
samples=$(wc -l < "$dir/samples")

# Looks every sample up again and again: a value is absent or right, never anything else.
read_meanwhile() {
    local found=0 absent=0 line key expected value status
    while [ ! -e "$dir/loaded" ]; do
        while IFS= read -r line; do
            key=${line%%;*} expected=${line#*;} status=0
            value=$("$ntdb" get --quiet "$db" "$key") || status=$?
            case $status in
                0)
                    [ "$value" = "$expected" ] || { echo "key $key: wrong value $value"; return 1; }
                    found=$((found + 1))
                    ;;
                1) absent=$((absent + 1)) ;;
                *) echo "key $key: status $status"; return 1 ;;
            esac
            [ ! -e "$dir/loaded" ] || break
        done < "$dir/samples"
    done
    echo "$((found + absent)) look-ups meanwhile: $found found, all right; $absent not there yet"
}

say "loading $lines records with 4 processes; one is killed at work, and another process reads"
read_meanwhile > "$dir/reader" 2>&1 &
reader=$!
"$ntdb" load "$db" "$data" --separator ';' --no-escapes --processes 4 --kill-one-worker \
    2> "$dir/load" || { cat "$dir/load"; fail "the load has failed"; }
touch "$dir/loaded"
cat "$dir/load"
grep -q 'was killed by signal 9' "$dir/load" || fail "no worker was killed"
status=0
wait "$reader" || status=$?
reader=
cat "$dir/reader"
[ "$status" = 0 ] || fail "the reader has seen something wrong"

say "the same load undisturbed, to see how fast it is"
"$ntdb" load --create "$dir/quiet.ntdb" "$data" --separator ';' --no-escapes --processes 4
"$ntdb" load --create "$dir/single.ntdb" "$data" --separator ';' --no-escapes
echo "(Each of the four reads the whole file, and there are $(nproc) processors here: with lines as"
echo "short as these one process is about as fast, or faster. What they show is that they may share.)"

say "looking $samples keys up"
wrong=0
while IFS= read -r line; do
    key=${line%%;*} expected=${line#*;}
    value=$("$ntdb" get "$db" "$key") && [ "$value" = "$expected" ] || wrong=$((wrong + 1))
done < "$dir/samples"
[ "$wrong" = 0 ] || fail "$wrong of $samples keys have a wrong value"
echo "all $samples right, for example:"
"$ntdb" get "$db" 2603
"$ntdb" get "$db" 1F980

say "comparing all records with the file"
# TABs do not occur in the data, so this is the file again, in another order.
"$ntdb" dump "$db" --separator ';' | LC_ALL=C sort > "$dir/dumped"
LC_ALL=C sort "$data" | cmp - "$dir/dumped" || fail "the database is not what the file says"
echo "all $lines are there, byte for byte"

say "checking the database"
"$ntdb" check "$db"
"$ntdb" stat "$db"

say "speed on this machine"
"$ntdb" bench speed 100000 --no-sync

say "done: nothing lost, nothing wrong"
