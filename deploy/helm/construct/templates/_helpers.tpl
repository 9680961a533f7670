{{- define "construct.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Selects all pods of the release. */ -}}
{{- define "construct.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "construct.labels" -}}
{{ include "construct.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "construct.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}:{{ $tag }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}

{{- /* The Secrets of the servers' addresses and of the keys: the operator's or the chart's. */ -}}
{{- define "construct.natsSecret" -}}
{{- if .Values.nats.evaluation.enabled -}}{{ include "construct.fullname" . }}-nats{{- else -}}{{ .Values.nats.urlSecret.name }}{{- end -}}
{{- end -}}

{{- /* The key of a service's address in the Secret. */ -}}
{{- define "construct.natsKey" -}}
{{- $nats := .root.Values.nats -}}
{{- if $nats.evaluation.enabled -}}url-{{ .service }}{{- else -}}{{ default $nats.urlSecret.key (index $nats.urlSecret.keys .service) }}{{- end -}}
{{- end -}}

{{- /* The users of the chart's NATS: the services, and people who watch. */ -}}
{{- define "construct.natsUsers" -}}
{{ .Files.Get "files/components.yaml" | fromYaml | keys | sortAlpha | join " " }} tap
{{- end -}}

{{- define "construct.postgresqlSecret" -}}
{{- if .Values.postgresql.evaluation.enabled -}}{{ include "construct.fullname" . }}-postgresql{{- else -}}{{ .Values.postgresql.urlSecret.name }}{{- end -}}
{{- end -}}

{{- define "construct.keysSecret" -}}
{{- default (printf "%s-keys" (include "construct.fullname" .)) .Values.keys.existingSecret -}}
{{- end -}}

{{- define "construct.natsMonitoring" -}}
{{- if .Values.nats.monitoring -}}
{{ .Values.nats.monitoring }}
{{- else if .Values.nats.evaluation.enabled -}}
{{ include "construct.fullname" . }}-nats.{{ .Release.Namespace }}.svc:8222
{{- end -}}
{{- end -}}

{{- define "construct.blobsClaim" -}}
{{- default (printf "%s-blobs" (include "construct.fullname" .)) .Values.blobs.existingClaim -}}
{{- end -}}

{{- /* Whether any service is part of the release. */ -}}
{{- define "construct.any" -}}
{{- $any := false -}}
{{- range $service, $facts := .Files.Get "files/components.yaml" | fromYaml -}}
{{- if (index $.Values $service).enabled }}{{ $any = true }}{{ end -}}
{{- end -}}
{{- if $any }}true{{ end -}}
{{- end -}}

{{- /* Whether any of these services uses PostgreSQL. */ -}}
{{- define "construct.database" -}}
{{- $any := false -}}
{{- range $service, $facts := .Files.Get "files/components.yaml" | fromYaml -}}
{{- if and (index $.Values $service).enabled $facts.database }}{{ $any = true }}{{ end -}}
{{- end -}}
{{- if $any }}true{{ end -}}
{{- end -}}

{{- /* A setting as an environment variable. Helm parses integers as floats, and would print large ones as 1e+06. */ -}}
{{- define "construct.text" -}}
{{- if kindIs "slice" . -}}
{{- $parts := list -}}
{{- range . }}{{ $parts = append $parts (include "construct.text" .) }}{{ end -}}
{{- join "," $parts -}}
{{- else if kindIs "map" . -}}
{{- $parts := list -}}
{{- range $name, $value := . -}}
{{- if kindIs "string" $value }}{{ $parts = append $parts (printf "%s=%q" $name $value) }}{{ else }}{{ $parts = append $parts (printf "%s=%s" $name (include "construct.text" $value)) }}{{ end -}}
{{- end -}}
{ {{- join "," $parts -}} }
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- /* The requirements of the restricted Pod Security Standard for a pod and a container. */ -}}
{{- define "construct.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "construct.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /*
The data of the Secrets that the chart creates: those in the cluster, or else new ones, once per rendering. Stored
with the values, where every template finds the same.
*/ -}}
{{- define "construct.generate" -}}
{{- if not (hasKey .Values "generated") -}}
{{- $fullname := include "construct.fullname" . -}}
{{- $generated := dict -}}
{{- $old := dict -}}
{{- if not .Values.keys.existingSecret }}{{ $old = (lookup "v1" "Secret" .Release.Namespace (printf "%s-keys" $fullname)).data | default dict }}{{ end -}}
{{- $keys := dict -}}
{{- range list "master.key" "secrets.key" "token.key" }}{{ $_ := set $keys . (index $old . | default (randBytes 32 | b64enc)) }}{{ end -}}
{{- $_ := set $generated "keys" $keys -}}
{{- $old = dict -}}
{{- if .Values.nats.evaluation.enabled }}{{ $old = (lookup "v1" "Secret" .Release.Namespace (printf "%s-nats" $fullname)).data | default dict }}{{ end -}}
{{- $nats := dict -}}
{{- range $user := splitList " " (include "construct.natsUsers" .) -}}
{{- $key := printf "password-%s" $user -}}
{{- /* It begins with a letter: NATS parses a variable's value as configuration, where digits are a number. */ -}}
{{- $password := ternary (index $old $key | default "" | b64dec) (printf "p%s" (randAlphaNum 40)) (hasKey $old $key) -}}
{{- $_ := set $nats $key ($password | b64enc) -}}
{{- $_ := set $nats (printf "url-%s" $user) (printf "nats://%s:%s@%s-nats:4222" $user $password $fullname | b64enc) -}}
{{- end -}}
{{- $_ := set $generated "nats" $nats -}}
{{- $old = dict -}}
{{- if .Values.postgresql.evaluation.enabled }}{{ $old = (lookup "v1" "Secret" .Release.Namespace (printf "%s-postgresql" $fullname)).data | default dict }}{{ end -}}
{{- $password := ternary ($old.password | default "" | b64dec) (randAlphaNum 40) (hasKey $old "password") -}}
{{- $url := printf "postgres://construct:%s@%s-postgresql:5432/construct" $password $fullname -}}
{{- $_ := set $generated "postgresql" (dict "password" ($password | b64enc) "url" ($url | b64enc)) -}}
{{- $_ := set .Values "generated" $generated -}}
{{- end -}}
{{- end -}}

{{- /* Changes with any Secret of the pods. Because of the keys in it, it does not reveal weak passwords. */ -}}
{{- define "construct.secretsChecksum" -}}
{{- include "construct.generate" . -}}
{{- if not .Values.generated.checksum -}}
{{- $data := dict -}}
{{- if .Values.keys.existingSecret }}{{ $_ := set $data "keys" (include "construct.dataOf" (dict "root" . "name" .Values.keys.existingSecret)) }}{{ else }}{{ $_ := set $data "keys" .Values.generated.keys }}{{ end -}}
{{- range list "nats" "postgresql" -}}
{{- $server := index $.Values . -}}
{{- if $server.evaluation.enabled }}{{ $_ := set $data . (index $.Values.generated .) }}{{ else if $server.urlSecret.name }}{{ $_ := set $data . (include "construct.dataOf" (dict "root" $ "name" $server.urlSecret.name)) }}{{ end -}}
{{- end -}}
{{- with .Values.nats.tls.secretName }}{{ $_ := set $data "nats-tls" (include "construct.dataOf" (dict "root" $ "name" .)) }}{{ end -}}
{{- $_ := set .Values.generated "checksum" (toJson $data | sha256sum) -}}
{{- end -}}
{{- .Values.generated.checksum -}}
{{- end -}}

{{- define "construct.dataOf" -}}
{{- (lookup "v1" "Secret" .root.Release.Namespace .name).data | toJson -}}
{{- end -}}
