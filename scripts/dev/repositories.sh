# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Real repositories for the scanner's tests: pinned packages, which each registry's own client
# fetches from its configured source, and a monorepo of more than ten thousand files made of them.
# They are kept; nothing is fetched twice.

repository_rust=hexyl-0.14.0.crate
repository_python=sqlite_utils-3.38.tar.gz
repository_node=svgo-3.3.2.tgz
# Packages that make the monorepo large.
repository_python_large=Django-5.1.4.tar.gz
repository_node_large=core-js-3.39.0.tgz
# Increase it when the content changes.
repository_monorepo=monorepo-1.tar.gz

# Fetches missing ones and sets CONSTRUCT_TEST_REPOSITORIES to the folder.
repositories_ensure() {
  CONSTRUCT_TEST_REPOSITORIES=$main_home/repositories
  export CONSTRUCT_TEST_REPOSITORIES
  mkdir -p -- "$CONSTRUCT_TEST_REPOSITORIES"
  chmod 755 -- "$CONSTRUCT_TEST_REPOSITORIES"
  repositories_fetch "$repository_rust" repositories_rust compiler
  repositories_fetch "$repository_python" repositories_python python
  repositories_fetch "$repository_python_large" repositories_python python
  repositories_fetch "$repository_node" repositories_node npm
  repositories_fetch "$repository_node_large" repositories_node npm
  if [[ ! -e $CONSTRUCT_TEST_REPOSITORIES/$repository_monorepo ]]; then
    timed "building $repository_monorepo" repositories_monorepo
  fi
}

# repositories_fetch NAME HOW GROUP: fetches a missing archive with the programs of the package
# group.
repositories_fetch() {
  if [[ -e $CONSTRUCT_TEST_REPOSITORIES/$1 ]]; then return 0; fi
  ensure_packages "$3"
  timed "fetching $1" "$2" "$1"
}

# repositories_keep FILE NAME: stores a file atomically. Removes the folder of FILE.
repositories_keep() {
  cp -- "$1" "$CONSTRUCT_TEST_REPOSITORIES/.$2"
  chmod 644 -- "$CONSTRUCT_TEST_REPOSITORIES/.$2"
  mv -- "$CONSTRUCT_TEST_REPOSITORIES/.$2" "$CONSTRUCT_TEST_REPOSITORIES/$2"
}

repositories_rust() {
  local folder archive name=${1%.crate}
  folder=$(mktemp -d)
  mkdir -- "$folder/src"
  : >"$folder/src/lib.rs"
  printf '[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2024"\n[dependencies]\n%s = "=%s"\n' \
    "${name%-*}" "${name##*-}" >"$folder/Cargo.toml"
  cargo fetch --quiet --manifest-path "$folder/Cargo.toml"
  archive=$(find "${CARGO_HOME:-$HOME/.cargo}/registry/cache" -name "$1" -print -quit)
  [[ -n $archive ]] || die "cargo has fetched $name, but its archive is not in its cache"
  repositories_keep "$archive" "$1"
  rm -rf -- "$folder"
}

# The source distribution: pip builds it to learn its name, and that build is discarded, so its
# dependencies need not be built.
repositories_python() {
  local folder name=${1%.tar.gz}
  folder=$(mktemp -d)
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary "${name%-*}" --dest "$folder" \
    "${name%-*}==${name##*-}"
  repositories_keep "$folder/$1" "$1"
  rm -rf -- "$folder"
}

repositories_node() {
  local folder name=${1%.tgz}
  folder=$(mktemp -d)
  npm pack --silent --pack-destination "$folder" "${name%-*}@${name##*-}" >/dev/null
  repositories_keep "$folder/$1" "$1"
  rm -rf -- "$folder"
}

# The packages in folders by language, below the single top folder of GitHub's archives, with the
# files that connect such a repository.
repositories_monorepo() {
  local folder top name packed
  folder=$(mktemp -d)
  top=$folder/octo-mono-1234567
  for name in "$repository_rust" "$repository_python" "$repository_python_large" "$repository_node" "$repository_node_large"; do
    case $name in
      *.crate) packed=crates/${name%-*} ;;
      *.tgz) packed=node/${name%-*} ;;
      *) packed=python/${name%-*} ;;
    esac
    mkdir -p -- "$top/$packed"
    tar -xzf "$CONSTRUCT_TEST_REPOSITORIES/$name" -C "$top/$packed" --strip-components=1 --no-same-owner
  done
  printf '# Mono\n\nEverything in one place: commands in Rust, Python and JavaScript.\n' >"$top/README.md"
  printf '[workspace]\nmembers = ["crates/*"]\nresolver = "3"\n' >"$top/Cargo.toml"
  printf '{"name": "mono", "private": true, "workspaces": ["node/*"]}\n' >"$top/package.json"
  # The same packages give the same bytes everywhere.
  tar -cf - -C "$folder" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX "${top##*/}" |
    gzip -n >"$folder/$repository_monorepo"
  repositories_keep "$folder/$repository_monorepo" "$repository_monorepo"
  rm -rf -- "$folder"
}
