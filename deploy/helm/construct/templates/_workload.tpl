{{- /*
A service's deployment with its other objects.
root: the chart's context; service: its name; name: the deployment's name, `interpreter-<pool>` for pools; facts: its entry in
files/components.yaml; values: its values; settings: its settings by the chart; pool: an interpreter's pool, else empty;
needed: the secrets it requires to start; mounts: Secrets mounted as files (name, mountPath, secretName, items);
scans: the claim with the files of scans, if it has them (mountPath, claimName, readOnly).
*/ -}}
{{- define "construct.workload" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $facts := .facts -}}
{{- $fullname := include "construct.fullname" $root -}}
{{- $name := printf "%s-%s" $fullname .name -}}
{{- $settings := dict "CONSTRUCT_SHUTDOWN_GRACE" (printf "%ss" (include "construct.text" $root.Values.shutdownGraceSeconds)) -}}
{{- range $key, $value := merge (dict) $values.config $root.Values.config .settings -}}
{{- $_ := set $settings (printf "CONSTRUCT_%s" (upper $key)) (include "construct.text" $value) -}}
{{- end -}}
{{- $mounts := .mounts | default list -}}
{{- with $root.Values.nats.tls -}}
{{- if .secretName -}}
{{- $folder := "/run/construct/nats" -}}
{{- $_ := set $settings "CONSTRUCT_NATS_CA_FILE" (printf "%s/ca.crt" $folder) -}}
{{- if .clientCertificate -}}
{{- $_ := set $settings "CONSTRUCT_NATS_CERTIFICATE_FILE" (printf "%s/tls.crt" $folder) -}}
{{- $_ := set $settings "CONSTRUCT_NATS_KEY_FILE" (printf "%s/tls.key" $folder) -}}
{{- end -}}
{{- $items := ternary (list "ca.crt" "tls.crt" "tls.key") (list "ca.crt") .clientCertificate -}}
{{- $mounts = append $mounts (dict "name" "nats" "mountPath" $folder "secretName" .secretName "items" $items) -}}
{{- end -}}
{{- end -}}
{{- $confined := and .pool (eq (default "refused" $values.commands) "confined") -}}
{{- $queue := and $values.autoscaling.queue $values.autoscaling.queue.enabled -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
automountServiceAccountToken: false
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
data: {{- toYaml $settings | nindent 2 }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
spec:
  {{- if not $values.autoscaling.enabled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  selector:
    matchLabels: {{- include "construct.podLabels" . | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {{- toYaml $values.rollout | nindent 6 }}
  template:
    metadata:
      labels: {{- include "construct.podLabels" . | nindent 8 }}
        construct/role: service
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        # A pod is replaced when its configuration or Secrets have changed.
        checksum/config: {{ toYaml $settings | sha256sum }}
        {{- $secrets := include "construct.secretsChecksum" $root }}
        {{- if $facts.secrets }}{{ $secrets = printf "%s %s" $secrets (include "construct.dataOf" (dict "root" $root "name" $values.existingSecret)) | sha256sum }}{{ end }}
        checksum/secrets: {{ $secrets }}
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      serviceAccountName: {{ $name }}
      automountServiceAccountToken: false
      # Otherwise Kubernetes sets CONSTRUCT_… variables for services of such names.
      enableServiceLinks: false
      {{- if .pool }}
      # The first process of the pod then reaps processes that commands leave behind.
      shareProcessNamespace: true
      {{- end }}
      {{- if $confined }}
      # Commands create namespaces; their users are not those of the node.
      hostUsers: false
      {{- end }}
      {{- with $values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets: {{- range . }}
        - name: {{ . }}
      {{- end }}
      {{- end }}
      securityContext: {{- include "construct.podSecurity" 10001 | nindent 8 }}
      terminationGracePeriodSeconds: {{ add $root.Values.shutdownGraceSeconds 10 }}
      {{- with $values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints:
        {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: {{ $values.topologySpread }}
          labelSelector:
            matchLabels: {{- include "construct.podLabels" $ | nindent 14 }}
          matchLabelKeys: [pod-template-hash]
        {{- end }}
      containers:
        - name: {{ .service }}
          image: {{ include "construct.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [{{ $facts.program }}]
          envFrom:
            - configMapRef: {name: {{ $name }}}
          env:
            - {name: CONSTRUCT_DATA_DIR, value: /var/lib/construct}
            - {name: CONSTRUCT_HEALTH_LISTEN, value: {{ printf "%s:8080" $root.Values.bindAddress | quote }}}
            {{- range $variable, $port := $facts.listen }}
            {{- if dig $port "enabled" true $values }}
            - {name: {{ $variable }}, value: {{ printf "%s:%v" $root.Values.bindAddress (index $facts.ports $port) | quote }}}
            {{- end }}
            {{- end }}
            - name: CONSTRUCT_NATS_URL
              valueFrom: {secretKeyRef: {name: {{ include "construct.natsSecret" $root }}, key: {{ include "construct.natsKey" . }}}}
            {{- if $facts.database }}
            - name: CONSTRUCT_DATABASE_URL
              valueFrom: {secretKeyRef: {name: {{ include "construct.postgresqlSecret" $root }}, key: {{ ternary "url" $root.Values.postgresql.urlSecret.key $root.Values.postgresql.evaluation.enabled }}}}
            {{- end }}
            {{- range $facts.keys }}
            - {name: CONSTRUCT_{{ upper . }}_KEY_FILE, value: /run/construct/keys/{{ . }}.key}
            {{- end }}
            {{- range $facts.secrets }}
            {{- $variable := printf "CONSTRUCT_%s" (upper .) }}
            - name: {{ $variable }}
              valueFrom: {secretKeyRef: {name: {{ $values.existingSecret }}, key: {{ $variable }}, optional: {{ not (has . $.needed) }}}}
            {{- end }}
            {{- with $root.Values.telemetry.otlpEndpoint }}
            - {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
            {{- end }}
          ports:
            - {name: health, containerPort: 8080}
            {{- range $port, $number := $facts.ports }}
            {{- if dig $port "enabled" true $values }}
            - {name: {{ $port }}, containerPort: {{ $number }}}
            {{- end }}
            {{- end }}
          # Liveness: whether the process answers at all.
          livenessProbe:
            httpGet: {path: /healthz, port: health}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          # Readiness: whether its dependencies are available and it is not draining.
          readinessProbe:
            httpGet: {path: /readyz, port: health}
            periodSeconds: 5
            timeoutSeconds: 3
            failureThreshold: 2
          startupProbe:
            httpGet: {path: /healthz, port: health}
            periodSeconds: 2
            timeoutSeconds: 3
            failureThreshold: 60
          {{- if $facts.sleep }}
          lifecycle:
            # Until it receives no more requests.
            preStop: {sleep: {seconds: 5}}
          {{- end }}
          resources: {{- toYaml $values.resources | nindent 12 }}
          securityContext: {{- include "construct.containerSecurity" . | nindent 12 }}
            {{- if $confined }}
            # bubblewrap mounts its own /proc, which the kernel allows only with an unmasked /proc.
            procMount: Unmasked
            seccompProfile: {{- toYaml $values.confinement.seccompProfile | nindent 14 }}
            appArmorProfile: {{- toYaml $values.confinement.appArmorProfile | nindent 14 }}
            {{- end }}
          volumeMounts:
            - {name: data, mountPath: /var/lib/construct}
            - {name: blobs, mountPath: /var/lib/construct/blobs}
            - {name: tmp, mountPath: /tmp}
            - {name: keys, mountPath: /run/construct/keys, readOnly: true}
            {{- if .pool }}
            - {name: workspaces, mountPath: /var/lib/construct/workspaces}
            {{- end }}
            {{- with .scans }}
            - {name: scans, mountPath: {{ .mountPath }}, readOnly: {{ .readOnly }}}
            {{- end }}
            {{- range $mounts }}
            - {name: {{ .name }}, mountPath: {{ .mountPath }}, readOnly: true}
            {{- end }}
            {{- range $values.folders }}
            - {name: folder-{{ .name }}, mountPath: {{ .mountPath }}, readOnly: {{ .readOnly | default false }}}
            {{- end }}
      volumes:
        # A cache: compiled code.
        - name: data
          emptyDir: {sizeLimit: 1Gi}
        - name: blobs
          persistentVolumeClaim: {claimName: {{ include "construct.blobsClaim" $root }}}
        - name: tmp
          emptyDir: {sizeLimit: 1Gi}
        - name: keys
          secret:
            secretName: {{ include "construct.keysSecret" $root }}
            # Readable by the container's group: 0440.
            defaultMode: 288
            items: {{- range $facts.keys }}
              - {key: {{ . }}.key, path: {{ . }}.key}
            {{- end }}
        {{- if .pool }}
        - name: workspaces
          {{- if eq $values.workspaces.type "emptyDir" }}
          emptyDir: {sizeLimit: {{ $values.workspaces.size }}}
          {{- else }}
          persistentVolumeClaim: {claimName: {{ default (printf "%s-workspaces" $name) $values.workspaces.existingClaim }}}
          {{- end }}
        {{- end }}
        {{- with .scans }}
        - name: scans
          persistentVolumeClaim: {claimName: {{ .claimName }}}
        {{- end }}
        {{- range $mounts }}
        - name: {{ .name }}
          secret:
            secretName: {{ .secretName }}
            defaultMode: 288
            items: {{- range .items }}
              - {key: {{ . }}, path: {{ . }}}
            {{- end }}
        {{- end }}
        {{- range $values.folders }}
        - name: folder-{{ .name }}
          persistentVolumeClaim: {claimName: {{ .existingClaim }}}
        {{- end }}
{{- if $values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
spec:
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  # A pod that is not ready must not block the draining of a node.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "construct.podLabels" . | nindent 6 }}
{{- end }}
{{- if and $values.autoscaling.enabled (not $queue) }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $name }}}
  minReplicas: {{ $values.autoscaling.minReplicas }}
  maxReplicas: {{ $values.autoscaling.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ $values.autoscaling.cpuPercent }}}
{{- end }}
{{- if and $values.autoscaling.enabled $queue }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
spec:
  scaleTargetRef: {name: {{ $name }}}
  minReplicaCount: {{ $values.autoscaling.minReplicas }}
  maxReplicaCount: {{ $values.autoscaling.maxReplicas }}
  triggers:
    - type: cpu
      metricType: Utilization
      metadata: {value: {{ $values.autoscaling.cpuPercent | toString | quote }}}
    {{- $read := default (dict "stream" "CONSTRUCT_CODE" "consumers" list) $facts.queue }}
    {{- $consumers := $read.consumers }}
    {{- if .pool }}
    {{- range .settings.interpreter_pools }}{{ $consumers = append $consumers (printf "code-%s" .) }}{{ end }}
    {{- end }}
    {{- range $consumers }}
    - type: nats-jetstream
      metadata:
        natsServerMonitoringEndpoint: {{ include "construct.natsMonitoring" $root | quote }}
        account: $G
        stream: {{ $read.stream }}
        consumer: {{ . }}
        lagThreshold: {{ $values.autoscaling.queue.lagThreshold | toString | quote }}
    {{- end }}
{{- end }}
{{- if and .pool (eq $values.workspaces.type "claim") (not $values.workspaces.existingClaim) }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ $name }}-workspaces
  labels: {{- include "construct.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
  annotations:
    helm.sh/resource-policy: keep
spec: {{- include "construct.claim" $values.workspaces | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "construct.podLabels" -}}
{{ include "construct.selector" .root }}
app.kubernetes.io/component: {{ .service }}
{{- if .pool }}
construct/pool: {{ .pool }}
{{- end }}
{{- end -}}

{{- define "construct.claim" -}}
accessModes: {{- toYaml .accessModes | nindent 2 }}
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end -}}
