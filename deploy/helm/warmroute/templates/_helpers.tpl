{{- define "warmroute.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- /* Fields of a part's pod that are absent unless set. */ -}}
{{- define "warmroute.podFields" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $field := list "serviceAccountName" "nodeSelector" "tolerations" "affinity" }}
{{- with index $.part $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .part.pod }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* A list's further items. */ -}}
{{- define "warmroute.further" -}}
{{- with . }}
{{ toYaml . }}
{{- end }}
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
