# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# The demo: starts an empty mesh of its own, shows one real job live, and stops everything again.

demo_report=REPORT.md

demo_run() {
  local began workspace
  began=$(now_ms)
  demo_model_choose
  ensure_rust
  ensure_packages servers sandbox compiler
  home_open "$main_home/demo"
  home_session exclusive "./dev demo"
  timed "building" mesh_build
  exit_run demo_stop
  home_lock
  # A killed demo may have left processes; every demo starts with an empty mesh.
  mesh_stop
  home_forget
  # Before the interpreter starts: its workspace root must exist. The demo's agent needs no other
  # directory and gets no other.
  workspace=$home/workspace
  # shellcheck disable=SC2034 # Read by mesh_workspace_roots.
  workspace_root=$workspace
  timed "copying this repository into $workspace" demo_workspace "$workspace"
  timed "starting NATS and PostgreSQL in $home" infra_up durable
  postgres_drop_all
  timed "starting the services" mesh_start
  home_unlock
  home_export
  demo_model_announce
  demo_create
  say "set-up took $((($(now_ms) - began) / 1000)) s; starting the job"
  demo_job "$workspace" || die "the job did not succeed (exit code $?); the services' logs are in $home/logs/"
  demo_show "$workspace/$demo_report"
}

demo_stop() {
  home_lock
  timed "stopping everything the demo started" mesh_stop
}

# A fresh copy of the tracked files; without tracked files, of everything that is not ignored;
# without git, of everything except the obvious.
demo_workspace() {
  local list=$home/workspace.list
  rm -rf -- "$1"
  mkdir -- "$1"
  # The folder may belong to another user (a mounted checkout), which git refuses unless it is
  # declared safe.
  local -a git=(git -c "safe.directory=$root")
  if ! { have git && "${git[@]}" ls-files -z >"$list" 2>/dev/null && [[ -s $list ]]; }; then
    if ! { have git && "${git[@]}" ls-files -z --others --exclude-standard >"$list" 2>/dev/null && [[ -s $list ]]; }; then
      find . \( -name target -o -name node_modules -o -path ./.git -o -path ./.construct -o -path "$main_home" \) -prune \
        -o \( -type f -o -type l \) -print0 >"$list"
    fi
  fi
  # A tracked file that was deleted here cannot be copied.
  while IFS= read -r -d '' file; do
    if [[ -e $file || -L $file ]]; then printf '%s\0' "$file"; fi
  done <"$list" >"$list.present"
  tar --create --null --files-from="$list.present" | tar --extract --directory="$1"
  rm -f -- "$1/$demo_report" "$list" "$list.present"
}

# Prints Ollama's address, HOST:PORT, from OLLAMA_HOST as its own clients read it; its server
# listens on the same value.
demo_ollama() {
  local host=${OLLAMA_HOST:-127.0.0.1}
  host=${host#*://}
  host=${host%%/*}
  [[ $host == *:* ]] || host+=:11434
  printf '%s\n' "${host/#0.0.0.0:/127.0.0.1:}"
}

# Sets `demo_*`: the model and its address. CONSTRUCT_DEMO_PROVIDER (anthropic, openai, ollama,
# scripted) and CONSTRUCT_DEMO_MODEL override the choice. Prices are US dollars per million tokens.
demo_model_choose() {
  local ollama tag=''
  demo_choice=${CONSTRUCT_DEMO_PROVIDER:-}
  ollama=$(demo_ollama)
  # The first one that is not an embedding model.
  tag=$(http_get "$ollama" /api/tags 2>/dev/null | grep -o '"name":"[^"]*"' | cut -d '"' -f 4 | grep -vi embed | head -n 1) || tag=''
  if [[ -z $demo_choice ]]; then
    if [[ -n ${ANTHROPIC_API_KEY:-} ]]; then
      demo_choice=anthropic
    elif [[ -n ${OPENAI_API_KEY:-} ]]; then
      demo_choice=openai
    elif [[ -n $tag ]]; then
      demo_choice=ollama
    else
      demo_choice=scripted
    fi
  fi
  demo_window=128000
  demo_prices=(--input-price 0 --output-price 0)
  case $demo_choice in
    anthropic)
      [[ -n ${ANTHROPIC_API_KEY:-} ]] || die "CONSTRUCT_DEMO_PROVIDER=anthropic needs ANTHROPIC_API_KEY"
      demo_provider=(--type anthropic --api-key-env ANTHROPIC_API_KEY)
      demo_model=${CONSTRUCT_DEMO_MODEL:-claude-sonnet-4-5}
      demo_window=200000
      # Writing to the vendor's cache costs more than plain input, reading a tenth.
      demo_prices=(--input-price 3 --output-price 15 --cache-read-price 0.3 --cache-write-price 3.75)
      ;;
    openai)
      [[ -n ${OPENAI_API_KEY:-} ]] || die "CONSTRUCT_DEMO_PROVIDER=openai needs OPENAI_API_KEY"
      demo_provider=(--type openai --api-key-env OPENAI_API_KEY)
      demo_model=${CONSTRUCT_DEMO_MODEL:-gpt-5-mini}
      # Writing to this vendor's cache is free.
      demo_prices=(--input-price 0.25 --output-price 2 --cache-read-price 0.025)
      ;;
    ollama)
      [[ -n $tag ]] || die "no Ollama with a model answers on http://$ollama (OLLAMA_HOST says where it is)"
      demo_provider=(--type ollama --base-url "http://$ollama")
      demo_model=${CONSTRUCT_DEMO_MODEL:-$tag}
      demo_window=32000
      ;;
    scripted)
      demo_script=$(realpath -m -- "${CONSTRUCT_DEMO_SCRIPT:-scripts/demo/script.json}")
      [[ -r $demo_script ]] || die "the demo's script $demo_script cannot be read"
      demo_provider=(--type scripted --script-file "$demo_script")
      demo_model=scripted
      # Invented prices, labeled as such, to show what costs look like.
      demo_prices=(--input-price 1 --output-price 4 --cache-read-price 0.1 --cache-write-price 1.25)
      ;;
    *) die "CONSTRUCT_DEMO_PROVIDER is '$demo_choice'; it can be anthropic, openai, ollama or scripted" ;;
  esac
}

demo_model_announce() {
  if [[ $demo_choice == scripted ]]; then
    say "the model is a BUILT-IN SCRIPT: its text and code are fixed, and no real model is called."
    note "The mesh, the sandbox, the tools and the report are real. For a real model set ANTHROPIC_API_KEY or"
    note "OPENAI_API_KEY, or start Ollama, and run ./dev demo again. The cost shown is FICTIONAL: nothing is charged."
  else
    say "the model is $demo_model ($demo_choice)"
    if [[ -n ${CONSTRUCT_DEMO_MODEL:-} && $demo_choice != ollama ]]; then
      note "Its cost is computed with the prices of the model that is the demo's default, and may be wrong."
    fi
  fi
}

# The demo's calls to the mesh, all of them through the public client.
demo_create() {
  local construct=$bin_dir/construct instructions=$home/instructions.md
  cat >"$instructions" <<'TEXT'
You are a careful software engineer who explores code bases. Work with the tools you are given; read before you claim.
Base every statement on what you have read, and name the files it comes from.
TEXT
  "$construct" modelprovider create demo "${demo_provider[@]}" >/dev/null
  "$construct" model create demo --provider demo --model-id "$demo_model" --context-window "$demo_window" "${demo_prices[@]}" >/dev/null
  "$construct" agent create demo --model demo --instructions-file "$instructions" >/dev/null
}

demo_job() {
  as_caller "$bin_dir/construct" exec --agent demo --workspace "$1" \
    "Explore the repository in your workspace: list its files, grep for the places where its parts meet, read the most telling files, \
and run a command that counts its lines of code. Then write $demo_report: what the project is, its parts and how they work together, \
with figures. Answer with a summary of three sentences."
}

demo_show() {
  [[ -s $1 ]] || die "the job ended without writing $1"
  say "the report is in $1 ($(wc -l <"$1") lines). It begins:"
  head -n 12 -- "$1" | sed 's/^/    | /' >&2
}
