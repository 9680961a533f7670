{{- /* The Service and Ingress of one port. */ -}}
{{- define "construct.service" -}}
{{- $name := printf "%s-%s" (include "construct.fullname" .root) .service -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .service }}
  {{- with .values.service.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ .values.service.type }}
  selector: {{- include "construct.podLabels" (dict "root" .root "service" .service) | nindent 4 }}
  ports:
    - {name: {{ .port }}, port: {{ .number }}, targetPort: {{ .port }}, appProtocol: {{ .protocol }}}
{{- with .values.ingress }}
{{- if .enabled }}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $name }}
  labels: {{- include "construct.labels" $.root | nindent 4 }}
    app.kubernetes.io/component: {{ $.service }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- if .tlsSecret }}
  tls:
    - hosts: [{{ .host | quote }}]
      secretName: {{ .tlsSecret }}
  {{- end }}
  rules:
    - host: {{ .host | quote }}
      http:
        paths:
          - path: /
            pathType: Prefix
            backend: {service: {name: {{ $name }}, port: {name: {{ $.port }}}}}
{{- end }}
{{- end }}
{{- end -}}
