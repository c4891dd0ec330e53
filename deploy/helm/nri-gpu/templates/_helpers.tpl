{{/* The image's name: the default cannot exist, because there is no public one. */}}
{{- define "nri-gpu.image" -}}
{{- $repository := required "image.repository is not set: there is no public image, so build one with deploy/Containerfile and name it as in your registry (--set image.repository=REGISTRY/nri-gpu)" .Values.image.repository -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* On which nodes all pods here run. */}}
{{- define "nri-gpu.nodes" -}}
{{- with .Values.nodeSelector -}}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Begins the names of what lies in no namespace: neither part has a dot, so that no two releases share a name. */}}
{{- define "nri-gpu.clusterwide" -}}
{{ .Release.Namespace }}.{{ .Release.Name }}
{{- end }}
