#!/usr/bin/env bash
# Builds the guests to Wasm, boots the QuickJS guest, and stores the results in artifacts/.
#
#   build.sh           writes artifacts/quickjs.wasm, artifacts/typescript.wasm and
#                      artifacts/SHA256SUMS, with the sums of the sources too
#   build.sh --check   builds into a temporary folder and compares with artifacts/ byte for byte
#
# The same sources give the same bytes on every machine with the same rustc (rust-toolchain.toml)
# and clang 19.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
target=wasm32-unknown-unknown
clang="${CONSTRUCT_CLANG:-clang-19}"

fail() {
  printf 'build.sh: %s\n' "$*" >&2
  exit 1
}

case "${1:-}" in
  '') check=false ;;
  --check) check=true ;;
  *) fail "unknown argument $1; usage: build.sh [--check]" ;;
esac

command -v cargo >/dev/null || fail 'cargo is missing: install Rust from https://rustup.rs'
command -v "$clang" >/dev/null ||
  fail "$clang is missing: install it (Debian: apt-get install --no-install-recommends clang-19) or name one with CONSTRUCT_CLANG"
"$clang" --version | grep -q 'version 19\.' ||
  fail "$clang is not clang 19; another version builds a working guest with other bytes, which the comparison would refuse"
"$clang" --print-targets 2>/dev/null | grep -q wasm32 || fail "$clang cannot compile to wasm32"
# Runs where rust-toolchain.toml applies, so that rustc is the pinned one.
[[ -d "$(cd "$here/quickjs" && rustc --print sysroot)/lib/rustlib/$target" ]] ||
  fail "Rust's $target target is missing: run 'rustup target add $target' in $here/quickjs"

out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT

# The artifact must not contain a path of this machine: it would differ between machines.
cargo_home="${CARGO_HOME:-$HOME/.cargo}"
sysroot="$(cd "$here/quickjs" && rustc --print sysroot)"
# guest_build FOLDER [FLAG]...: builds one guest, with further flags for rustc.
guest_build() (
  cd "$here/$1"
  unset CARGO_ENCODED_RUSTFLAGS CFLAGS CPPFLAGS CARGO_TARGET_DIR CARGO_BUILD_TARGET
  export CC_wasm32_unknown_unknown="$clang"
  export CFLAGS_wasm32_unknown_unknown="-ffile-prefix-map=$cargo_home=/cargo -ffile-prefix-map=$here=/guest"
  cargo fetch --quiet --locked
  remap="--remap-path-prefix=$cargo_home=/cargo --remap-path-prefix=$here=/guest --remap-path-prefix=$sysroot=/rust"
  # The name of the folder of sources depends on the registry they came from, which may be a mirror.
  for sources in "$cargo_home"/registry/src/*/; do
    remap+=" --remap-path-prefix=${sources%/}=/cargo/registry"
  done
  export RUSTFLAGS="$remap ${*:2}"
  cargo build --quiet --locked --release --target "$target"
)

printf 'building the QuickJS guest …\n'
guest_build quickjs
printf 'building the TypeScript guest …\n'
# The parser recurses: ordinary nesting would overflow the usual stack of 1 MiB.
guest_build typescript -C link-arg=-zstack-size=8388608
printf 'building the tool that boots it …\n'
(
  cd "$here/preinit"
  unset CARGO_TARGET_DIR CARGO_BUILD_TARGET
  cargo build --quiet --locked
)
"$here/preinit/target/debug/construct-guest-preinit" \
  "$here/quickjs/target/$target/release/construct_guest_quickjs.wasm" "$out/quickjs.wasm"

install -m 644 "$here/typescript/target/$target/release/construct_guest_typescript.wasm" "$out/typescript.wasm"

artifacts=(quickjs.wasm typescript.wasm)
for file in "${artifacts[@]}"; do
  if grep -qaF -e "$cargo_home" -e "$here" "$out/$file"; then
    fail "$file contains a path of this machine"
  fi
done
# Includes the sources: a test detects changed sources without new artifacts, without a build.
(cd "$out" && sha256sum "${artifacts[@]}" >SHA256SUMS)
(cd "$here/artifacts" && find ../*/src ../*/Cargo.* ../*/rust-toolchain.toml ../build.sh -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) \
  >>"$out/SHA256SUMS"

if "$check"; then
  for file in "${artifacts[@]}" SHA256SUMS; do
    cmp "$out/$file" "$here/artifacts/$file" ||
      fail "artifacts/$file is not what the sources build; run services/interpreter/guest/build.sh and commit the result"
  done
  printf 'the artifacts are what the sources build\n'
else
  mkdir -p "$here/artifacts"
  (cd "$out" && cp "${artifacts[@]}" SHA256SUMS "$here/artifacts/")
  cat "$here/artifacts/SHA256SUMS"
fi
