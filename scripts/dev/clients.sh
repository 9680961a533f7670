# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Third-party clients in other languages against a gateway: Google's gRPC for Python, and Buf's
# Connect for Node. Logins at a third-party issuer, npm's oidc-provider. The SDKs of OpenAI and
# Anthropic against the proxy.

# clients: tests/clients and tests/sdk have the tests. The packages come from PyPI and npm's
# registry once. The gateway is one of the tests', with its own database and NATS.
clients_check() {
  local folder=$main_home/clients name found
  ensure_rust
  ensure_packages servers compiler npm
  found=$(node --version 2>/dev/null) || die "npm is installed, but Node is not: install Node 20 or newer"
  found=${found#v}
  ((${found%%.*} >= 20)) || die "the clients need Node 20 or newer, but node is $found"
  python_with "$folder/python" tests/clients/requirements.txt "Google's gRPC"
  python_with "$folder/sdk" tests/sdk/requirements.txt "the SDKs of OpenAI and Anthropic"
  clients_install_node "$folder/node"
  checks_database_start
  for name in "${settings[@]}"; do unset "${name%%=*}"; done
  unset CONSTRUCT_MASTER_KEY CONSTRUCT_SECRETS_KEY CONSTRUCT_TOKEN_KEY
  CONSTRUCT_TEST_DATABASE_URL=$(postgres_url postgres)
  CONSTRUCT_TEST_NATS_SERVER=$(command -v nats-server)
  as_caller cargo build "${cargo_flags[@]}" -p construct-cli
  CONSTRUCT_TEST_CLI=$target_dir/debug/construct
  export CONSTRUCT_TEST_DATABASE_URL CONSTRUCT_TEST_NATS_SERVER CONSTRUCT_TEST_CLIENTS=$folder CONSTRUCT_TEST_CLI
  say "testing the clients"
  as_caller cargo test "${cargo_flags[@]}" -p construct-gateway --lib -- --nocapture tests::clients::
  CONSTRUCT_TEST_SDK_PYTHON=$folder/sdk/bin/python
  export CONSTRUCT_TEST_SDK_PYTHON
  say "testing the vendors' SDKs"
  as_caller cargo test "${cargo_flags[@]}" -p construct-providers --lib -- --nocapture --exact proxy::tests::exchange::official_sdks_work
}

# clients_install_node FOLDER: installs the packages of the lock file when they have changed.
clients_install_node() {
  local mark
  mark=$(cat tests/clients/package.json tests/clients/package-lock.json | sha256sum)
  if [[ -e $1/installed && $(<"$1/installed") == "$mark" ]]; then return 0; fi
  rm -rf -- "$1"
  mkdir -p -- "$1"
  cp -- tests/clients/package.json tests/clients/package-lock.json "$1/"
  timed "installing Buf's Connect and an issuer in $1" clients_npm "$1"
  printf '%s\n' "$mark" >"$1/installed"
}

# No package may run scripts; the lock file has the hash of each.
clients_npm() {
  npm ci --silent --no-audit --no-fund --ignore-scripts --prefix "$1" ||
    die "npm could not install what tests/clients/package-lock.json lists: is its registry reachable? ($(npm config get registry))"
}
