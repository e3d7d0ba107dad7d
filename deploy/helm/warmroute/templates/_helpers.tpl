{{- define "warmroute.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "warmroute.labels" -}}
{ app.kubernetes.io/name: warmroute, app.kubernetes.io/component: {{ . }} }
{{- end }}

{{- define "warmroute.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- /* Pods are replaced when the environment changes, which the ConfigMap's name does not state. */ -}}
{{- define "warmroute.checksum" -}}
checksum/config: {{ include (print .Template.BasePath "/config.yaml") . | sha256sum }}
{{- end }}

{{- define "warmroute.natsVolume" -}}
- name: nats
  secret: { secretName: {{ .root.Values.nats.secret }}, items: [{ key: {{ .role }}, path: {{ .role }} }] }
{{- end }}

{{- define "warmroute.tlsVolume" -}}
- { name: tls, configMap: { name: {{ .Values.tls.configMap }} } }
{{- end }}

{{- define "warmroute.tlsMount" -}}
- { name: tls, mountPath: /etc/warmroute-tls, readOnly: true }
{{- end }}

{{- define "warmroute.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "warmroute.labels" . }}
{{- end }}
