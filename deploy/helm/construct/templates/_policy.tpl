{{- /* Egress rules by destination. `to` is one of dns, nats, postgresql, internet, proxy, gateway, telemetry. */ -}}
{{- define "construct.egress" -}}
{{- $root := .root -}}
{{- $policy := $root.Values.networkPolicy -}}
{{- if eq .to "dns" }}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
  {{- with $policy.dns }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- else if eq .to "internet" }}
- ports:
    {{- range $policy.internet.ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  to:
    - ipBlock: {cidr: 0.0.0.0/0, except: {{ toJson $policy.internet.except }}}
    - ipBlock: {cidr: "::/0", except: {{ toJson $policy.internet.exceptV6 }}}
{{- else if eq .to "proxy" }}
{{- if and $root.Values.providers.enabled $root.Values.providers.proxy.enabled }}
- ports: [{port: proxy, protocol: TCP}]
  to:
    - podSelector:
        matchLabels: {{- include "construct.podLabels" (dict "root" $root "service" "providers") | nindent 10 }}
{{- end }}
{{- else if eq .to "gateway" }}
{{- if $root.Values.gateway.enabled }}
- ports: [{port: grpc, protocol: TCP}]
  to:
    - podSelector:
        matchLabels: {{- include "construct.podLabels" (dict "root" $root "service" "gateway") | nindent 10 }}
{{- end }}
{{- else if and (has .to (list "nats" "postgresql")) (index $root.Values .to).evaluation.enabled }}
- ports: [{port: {{ .to }}, protocol: TCP}]
  to:
    - podSelector:
        matchLabels: {{- include "construct.podLabels" (dict "root" $root "service" .to) | nindent 10 }}
{{- else }}
{{- $rule := index $policy .to }}
- ports:
    {{- range $rule.ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with $rule.to }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "construct.policyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "construct.fullname" .root }}-{{ .component }}
  labels: {{- include "construct.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
{{- end -}}
