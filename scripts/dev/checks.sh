# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Tests, lint, benchmarks, and checks of generated files that are committed.

# test [--build-only] [ARGS]: `ci` is nextest's profile unless ARGS name another one.
checks_test() {
  local name status=0 log
  local -a nextest=()
  ensure_rust
  ensure_packages servers client sandbox clocks compiler
  repositories_ensure
  test262_ensure
  checks_database_start
  # The tests must not use a mesh that the caller's shell points to.
  for name in "${settings[@]}"; do unset "${name%%=*}"; done
  unset CONSTRUCT_MASTER_KEY CONSTRUCT_SECRETS_KEY CONSTRUCT_TOKEN_KEY
  # Tests create their databases in the first, and start their NATS servers with the second.
  CONSTRUCT_TEST_DATABASE_URL=$(postgres_url postgres)
  CONSTRUCT_TEST_NATS_SERVER=$(command -v nats-server)
  CONSTRUCT_TEST_POSTGRES=$(postgres_bin_find)
  export CONSTRUCT_TEST_DATABASE_URL CONSTRUCT_TEST_NATS_SERVER CONSTRUCT_TEST_POSTGRES
  # The end-to-end tests start the services' programs, which building the tests alone does not
  # build.
  timed "building the services" mesh_build
  if ! cargo nextest --version >/dev/null 2>&1; then
    timed "building the tests" as_caller cargo test "${cargo_flags[@]}" --workspace --no-run
    if [[ ${1:-} == --build-only ]]; then return; fi
    checks_settings
    say "running the tests (all of them: cargo-nextest, which has profiles, is not installed)"
    checks_cargo_test "$@"
    return
  fi
  timed "building the tests" as_caller cargo nextest run "${cargo_flags[@]}" --workspace --no-run
  if [[ ${1:-} == --build-only ]]; then return; fi
  checks_settings
  [[ " $* " == *" -P "* || " $* " == *" --profile "* ]] || nextest+=(-P ci)
  # Most tests mostly wait, and those with a mesh take two slots. Without capture only one runs at a
  # time.
  [[ " $* " == *" --no-capture "* || " $* " == *" --nocapture "* || -n ${NEXTEST_TEST_THREADS-} ]] ||
    nextest+=(--test-threads "$(($(nproc) * 3))")
  say "running the tests"
  log=$home/logs/test-$$.log
  as_caller cargo nextest run "${cargo_flags[@]}" --workspace "${nextest[@]}" "$@" 2>&1 | tee -- "$log" || status=$?
  checks_flaky "$log" || status=1
  grep -E '^ *Summary \[' -- "$log" | tail -n 1 >"$home/logs/summary" || true
  rm -f -- "$log"
  return "$status"
}

# Cheap checks of settings that exist in two places.
checks_settings() {
  timed "checking docker-compose.yml" checks_compose
  timed "checking the chart's settings" charts_settings
}

# checks_flaky LOG: lists the tests that passed only at the second attempt, and fails if one of them
# is a known flaky test.
checks_flaky() {
  local known=$root/.config/flaky.txt name again=''
  local -a flaky=()
  mapfile -t flaky < <(sed -n 's/^ *FLAKY [0-9/]* \[[^]]*\] *\(([^)]*) *\)\{0,1\}//p' "$1" | sort -u)
  ((${#flaky[@]} > 0)) || return 0
  warn "${#flaky[@]} flaky tests, each of them a bug (add them to .config/flaky.txt with the date, and fix them):"
  for name in "${flaky[@]}"; do
    note "$name"
    if grep -qF -- " ${name##* }" "$known"; then again+=" ${name##* }"; fi
  done
  if [[ -n $again ]]; then
    warn "flaky for the second time:$again"
    return 1
  fi
}

# `cargo test` reports per binary; prints the sum last.
checks_cargo_test() {
  local output=$home/logs/test.log status=0
  as_caller cargo test "${cargo_flags[@]}" --workspace "$@" | tee -- "$output" || status=$?
  awk '
    /^test result:/ {
      for (i = 1; i < NF; i++) {
        if ($(i + 1) == "passed;") passed += $i
        if ($(i + 1) == "failed;") failed += $i
        if ($(i + 1) == "ignored;") ignored += $i
      }
      binaries++
    }
    END { printf "\ntest summary: %d passed, %d failed, %d ignored in %d test binaries\n", passed, failed, ignored, binaries }
  ' "$output"
  return "$status"
}

# Checks that each service accepts its environment in docker-compose.yml, without containers: runs
# its program with exactly that environment.
checks_compose() {
  local service shown
  local -a variables
  for service in "${services[@]}"; do
    mapfile -d '' -t variables < <(checks_compose_environment "$service")
    ((${#variables[@]} > 0)) || die "docker-compose.yml: no environment was found for $service"
    env -i "${variables[@]}" "$bin_dir/construct-$service" --check-config >/dev/null ||
      die "docker-compose.yml: $service does not accept its environment"
  done
  # The file has the mount of the workspaces and their grant in two places.
  mapfile -d '' -t variables < <(checks_compose_environment interpreter)
  shown=$(env -i "${variables[@]}" "$bin_dir/construct-interpreter" --print-config)
  [[ $shown == *'"/workspaces"'* ]] || die "docker-compose.yml: the interpreter is not granted /workspaces"
}

# checks_compose_environment SERVICE: prints NAME=VALUE entries, each ended by a zero byte. Parses
# only the YAML that the file uses: one variable per line, and merged blocks. Compose's
# ${NAME:-default} means the same in bash, which expands it here; the file is trusted.
checks_compose_environment() (
  set -euo pipefail
  # Variables that compose requires or takes from the caller's shell.
  local user
  for user in GATEWAY INTERPRETER PROVIDERS RECONCILER SCANNER SLACK TAP; do export "CONSTRUCT_NATS_${user}_PASSWORD=check"; done
  export CONSTRUCT_POSTGRES_PASSWORD=check CONSTRUCT_MASTER_KEY CONSTRUCT_SECRETS_KEY
  CONSTRUCT_MASTER_KEY=$(head -c 32 /dev/zero | base64)
  CONSTRUCT_SECRETS_KEY=$(head -c 32 /dev/zero | tr '\0' '\1' | base64)
  CONSTRUCT_TOKEN_KEY=$(head -c 32 /dev/zero | tr '\0' '\2' | base64)
  export CONSTRUCT_TOKEN_KEY
  unset CONSTRUCT_LOG CONSTRUCT_LOG_FORMAT CONSTRUCT_RECONCILER_CONCURRENCY
  awk -v service="$1" '
    function variable(line) {
      sub(/^ +/, "", line)
      if (line !~ /^[A-Z_]+: ./) return ""
      sub(/: /, "=", line)
      if (line ~ /="/) { sub(/="/, "=", line); sub(/"$/, "", line) }
      return line
    }
    /^x-[a-z]+: &[a-z]+$/ { block = substr($2, 2) }
    /^services:/ { block = "" }
    /^[a-z]/ && !/^x-/ { inside = /^services:/; mine = 0 }
    inside && /^  [a-z]/ { mine = $1 == service ":"; environment = 0 }
    mine && /^    [a-z]/ { environment = $1 == "environment:" }
    block != "" && /^  [A-Z_]+:/ { blocks[block] = blocks[block] variable($0) "\n" }
    mine && environment && /^      <<:/ {
      line = $0
      gsub(/.*<<:|[][*, ]+/, " ", line)
      count = split(line, names, " ")
      for (i = 1; i <= count; i++) printf "%s", blocks[names[i]]
    }
    mine && environment && /^      [A-Z_]+:/ { print variable($0) }
  ' docker-compose.yml | while IFS= read -r line; do
    [[ -n $line ]] || continue
    eval "value=\"${line#*=}\""
    # shellcheck disable=SC2154 # Set by eval.
    printf '%s=%s\0' "${line%%=*}" "$value"
  done
)

# A PostgreSQL for tests, shared by overlapping runs; the last one to end stops it.
checks_database_start() {
  home_open "$main_home/test"
  home_session shared
  exit_run checks_database_stop
  home_lock
  if ! process_running postgres; then
    timed "starting PostgreSQL in $home" postgres_start disposable
    # Killed runs leave their databases behind.
    postgres_drop_all
  else
    postgres_start disposable
  fi
  home_unlock
}

# Silent, so that the test runner's output comes last.
checks_database_stop() {
  home_lock
  if home_session_last; then process_stop INT 20 postgres; fi
}

# Processes killed at random must not repeat side effects: the tests run some trials, this many.
checks_chaos() {
  local usage="usage: ./dev chaos [mesh|disks|clocks|clients|scripts|kills|upgrade [COMMIT]]"
  case ${1:-mesh} in
    mesh) (($# <= 1)) || die "$usage"; checks_chaos_mesh kinds::mesh_with_all_faults; return ;;
    disks) (($# == 1)) || die "$usage"; checks_chaos_mesh kinds::mesh_on_full_disks; return ;;
    clocks) (($# == 1)) || die "$usage"; checks_chaos_mesh kinds::mesh_with_jumping_clocks; return ;;
    clients) (($# == 1)) || die "$usage"; checks_chaos_mesh kinds::mesh_with_slack_and_scanner; return ;;
    kills)
      (($# == 1)) || die "$usage"
      export CONSTRUCT_TRIALS=${CONSTRUCT_TRIALS:-1000}
      checks_chaos_mesh durable:: e2e
      return
      ;;
    upgrade) (($# <= 2)) || die "$usage"; checks_chaos_upgrade "${2:-}"; return ;;
    scripts) (($# == 1)) || die "$usage" ;;
    *) die "$usage" ;;
  esac
  ensure_rust
  ensure_packages servers sandbox compiler
  CONSTRUCT_TEST_NATS_SERVER=$(command -v nats-server)
  export CONSTRUCT_TEST_NATS_SERVER CONSTRUCT_TRIALS=${CONSTRUCT_TRIALS:-1000}
  say "$CONSTRUCT_TRIALS trials each of scripts with fifty calls, one after the other and five at a time"
  as_caller cargo test "${cargo_flags[@]}" -p construct-interpreter --lib execution::tests::trials:: -- --nocapture
}

# checks_chaos_upgrade [COMMIT]: starts with the version of the commit (default: the one before the
# newest schema change), and replaces it by this one.
checks_chaos_upgrade() {
  local commit=$1 folder=$main_home/upgrade
  if [[ -z $commit ]]; then commit=$(as_caller git rev-list -1 HEAD -- crates/store/migrations)^; fi
  commit=$(as_caller git rev-parse --verify --quiet "$commit^{commit}") || die "there is no commit ${1:-before the newest migration}"
  ensure_rust
  ensure_packages compiler
  mkdir -p -- "$folder"
  rm -rf -- "$folder/source"
  as_caller mkdir -- "$folder/source"
  as_caller git archive "$commit" | as_caller tar -x -C "$folder/source"
  say "the earlier version is $(as_caller git log -1 --format='%h %s' "$commit")"
  (cd -- "$folder/source" && timed "building that version" as_caller env CARGO_TARGET_DIR="$folder/target" cargo build --locked --workspace --bins)
  export CONSTRUCT_PREVIOUS=$folder/target/debug
  checks_chaos_mesh upgrade_under_load
}

# checks_chaos_mesh TEST [BINARY]: trials start their own PostgreSQL, because its processes are
# killed and its disk is full. An upgrade uses the shared one.
checks_chaos_mesh() {
  local name
  ensure_rust
  ensure_packages servers sandbox clocks compiler
  home_open "$main_home/chaos"
  home_session exclusive "./dev chaos mesh"
  exit_run infra_down
  infra_down
  timed "starting PostgreSQL in $home" postgres_start durable
  for name in "${settings[@]}"; do unset "${name%%=*}"; done
  unset CONSTRUCT_MASTER_KEY CONSTRUCT_SECRETS_KEY CONSTRUCT_TOKEN_KEY
  CONSTRUCT_TEST_DATABASE_URL=$(postgres_url postgres)
  CONSTRUCT_TEST_NATS_SERVER=$(command -v nats-server)
  CONSTRUCT_TEST_POSTGRES=$(postgres_bin_find)
  export CONSTRUCT_TEST_DATABASE_URL CONSTRUCT_TEST_NATS_SERVER CONSTRUCT_TEST_POSTGRES
  export CONSTRUCT_TRIALS=${CONSTRUCT_TRIALS:-20}
  timed "building" mesh_build
  as_caller cargo test "${cargo_flags[@]}" --workspace --test "${2:-chaos}" -- --nocapture "$1"
}

checks_bench() {
  if (($# == 0)) || [[ $1 == -* ]]; then die "usage: ./dev bench NAME [--json]"; fi
  local service
  local -a packages=(-p construct-benches)
  for service in "${services[@]}"; do packages+=(-p "construct-$service"); done
  ensure_rust
  ensure_packages servers sandbox compiler
  timed "building with optimizations" as_caller cargo build "${cargo_flags[@]}" --release --bins "${packages[@]}"
  home_open "$main_home/bench"
  home_session exclusive "./dev bench"
  exit_run infra_down
  # Figures are comparable only when every run starts with the same, empty state.
  infra_down
  home_forget
  timed "starting NATS and PostgreSQL in $home" infra_up durable
  postgres_drop_all
  home_export
  # Some benchmarks act as several services, and their floor has its own streams.
  CONSTRUCT_NATS_URL=$(nats_url admin)
  export CONSTRUCT_NATS_URL
  if [[ $1 == providers ]]; then
    timed "setting up the peers in $main_home/peers" as_caller benches/peers/setup "$main_home/peers"
    export CONSTRUCT_BENCH_PEERS=$main_home/peers
  fi
  as_caller "$target_dir/release/construct-bench" "$@"
}

checks_fuzz() {
  local name=${1:-} seconds=300 package=construct-interpreter test
  case $name in
    calls) test=tools::tests::fuzz::random_calls_end_as_their_definitions_describe ;;
    programs) test=tests::fuzz::programs::random_programs_never_fail_the_sandbox ;;
    operator) package=construct-gateway test=protocols::operator::request::tests::random_lines_are_parsed_or_refused ;;
    connect) package=construct-gateway test=protocols::connect::stream::tests::random_bodies_are_parsed_or_refused ;;
    pages) package=construct-gateway test=page::tests::random_tokens_are_ours_or_refused ;;
    *) die "usage: ./dev fuzz calls|programs|operator|connect|pages [--seconds N]" ;;
  esac
  if [[ ${2:-} == --seconds && ${3:-} =~ ^[0-9]+$ && $# -eq 3 ]]; then
    seconds=$3
  elif (($# > 1)); then
    die "usage: ./dev fuzz calls|programs|operator|connect|pages [--seconds N]"
  fi
  ensure_rust
  ensure_packages sandbox compiler
  CONSTRUCT_FUZZ_SECONDS=$seconds as_caller cargo test "${cargo_flags[@]}" -p "$package" --lib -- --exact --nocapture "$test"
}

# `--suite` uses another suite than the part that `./dev test` runs, for example a checkout of
# tc39/test262.
checks_test262() {
  local suite=''
  local -a arguments=()
  while (($# > 0)); do
    case $1 in
      --suite)
        [[ -d ${2:-}/test && -d ${2:-}/harness ]] || die "--suite needs a folder with test/ and harness/"
        suite=$(realpath -- "$2")
        shift
        ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
  ensure_rust
  ensure_packages compiler
  if [[ -z $suite ]]; then
    test262_ensure
    suite=$CONSTRUCT_TEST_TEST262
  fi
  as_caller cargo run "${cargo_flags[@]}" --quiet -p construct-interpreter --example test262 -- "$suite" "${arguments[@]}"
}

# lint [--sqlx]: with it, clippy checks the queries against a real database, as `sqlx --check` does,
# in one compilation.
checks_lint() {
  local guest
  case ${1:-} in
    '' | --sqlx) ;;
    *) die "usage: ./dev lint [--sqlx]" ;;
  esac
  ensure_rust
  ensure_packages compiler
  timed "format" as_caller cargo fmt --all -- --check
  for guest in preinit quickjs typescript; do
    timed "format of the guest's part $guest" as_caller cargo fmt --manifest-path "services/interpreter/guest/$guest/Cargo.toml" -- --check
  done
  timed "language" checks_language
  if [[ ${1:-} == --sqlx ]]; then
    checks_queries_begin
    timed "clippy" checks_queries_with cargo clippy "${cargo_flags[@]}" --workspace --all-targets -- -D warnings
    checks_queries_compare
  else
    timed "clippy" as_caller cargo clippy "${cargo_flags[@]}" --workspace --all-targets -- -D warnings
  fi
  RUSTDOCFLAGS=-Dwarnings timed "documentation" as_caller cargo doc "${cargo_flags[@]}" --workspace --no-deps
}

# Checks names and prose against docs/GLOSSARY.md.
checks_language() {
  ensure_packages python
  as_caller python3 scripts/dev/language.py
}

# The checked SQL macros describe each query with a database that has the current schema, and write
# the metadata to SQLX_OFFLINE_DIR, one file per query. It is collected in a new folder and then
# compared or replaced as a whole, so that files of removed queries disappear, and a failed build
# changes nothing.
checks_sqlx() {
  case ${1:-} in
    '' | --check) ;;
    *) die "usage: ./dev sqlx [--check]" ;;
  esac
  ensure_rust
  ensure_packages compiler
  checks_queries_begin
  checks_queries_with cargo check "${cargo_flags[@]}" -p construct-store --all-targets
  if [[ -n ${1:-} ]]; then
    checks_queries_compare
  else
    rm -rf -- "$queries_committed"
    cp -r -- "$queries_fresh" "$queries_committed"
    chmod -R u=rwX,go=rX -- "$queries_committed"
    rm -rf -- "$queries_fresh"
    say "crates/store/.sqlx holds $(find "$queries_committed" -name 'query-*.json' | wc -l) queries"
  fi
}

# A database with the current schema, and an empty folder for the metadata of the macros.
checks_queries_begin() {
  local migration
  queries_committed=$root/crates/store/.sqlx
  queries_database=construct_sqlx_$$
  ensure_packages servers
  checks_database_start
  postgres_query postgres "CREATE DATABASE $queries_database"
  say "applying the migrations"
  for migration in crates/store/migrations/*.sql; do
    if [[ $migration == *.down.sql ]]; then continue; fi
    [[ -e $migration ]] || die "there are no migrations in crates/store/migrations"
    checks_migrate "$queries_database" "$migration" || die "$migration could not be applied"
  done
  queries_fresh=$home/sqlx-$$
  mkdir -- "$queries_fresh"
}

# checks_queries_with COMMAND...: compiles with that database.
checks_queries_with() {
  # Macros run again only when their crate is recompiled.
  touch crates/store/src/lib.rs
  if ! SQLX_OFFLINE=false SQLX_OFFLINE_DIR=$queries_fresh DATABASE_URL=$(postgres_url "$queries_database") as_caller "$@"; then
    rm -rf -- "$queries_fresh"
    die "failed: $*"
  fi
  postgres_query postgres "DROP DATABASE $queries_database WITH (FORCE)"
  chmod -R u=rwX,go=rX -- "$queries_fresh"
}

checks_queries_compare() {
  mkdir -p -- "$home/empty"
  if diff -r -- "$([[ -d $queries_committed ]] && echo "$queries_committed" || echo "$home/empty")" "$queries_fresh" >&2; then
    rm -rf -- "$queries_fresh"
    say "crates/store/.sqlx is up to date"
  else
    rm -rf -- "$queries_fresh"
    die "crates/store/.sqlx is out of date; run ./dev sqlx and commit the result"
  fi
}

checks_migrate() {
  local bin
  local -a transaction=(--single-transaction)
  bin=$(postgres_bin_find)
  # The marker by which a migration tells sqlx that it cannot run in a transaction.
  if head -n 1 -- "$2" | grep -q '^-- no-transaction'; then transaction=(); fi
  PGPASSWORD=$(<"$home/postgres.password") "$bin/psql" -X -q -v ON_ERROR_STOP=1 "${transaction[@]}" \
    -h 127.0.0.1 -p "${ports[postgres]}" -U construct -d "$1" -f "$2" >/dev/null
}

checks_guest() {
  case ${1:-} in
    '' | --check) ;;
    *) die "usage: ./dev guest [--check]" ;;
  esac
  ensure_rust
  ensure_packages compiler guest
  if have rustup && ! rustup target list --installed | grep -qx wasm32-unknown-unknown; then
    timed "installing the Wasm target" rustup target add wasm32-unknown-unknown
  fi
  as_caller services/interpreter/guest/build.sh "$@"
}
