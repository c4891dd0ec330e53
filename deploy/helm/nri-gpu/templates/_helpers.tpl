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

{{/*
A probe by the liveness file (nri_gpu/system/liveness.py): its path, the seconds that it may be old, and `ready` where it must
say so. Read by the image's shell alone, in a millisecond of CPU: on a busy node Python would start too late, and a needless
restart would leave a gap.
*/}}
{{- define "nri-gpu.alive" -}}
exec:
  command:
    - sh
    - -c
    - read -r now _ </proc/uptime && read -r at word <"$0" && [ $((${now%.*} - at)) -le "$1" ] && [ "$word" = "${2-$word}" ]
    {{- range . }}
    - {{ . | quote }}
    {{- end }}
{{- end }}

{{/* Not empty where the release only observes; what every other mode needs is left out then. */}}
{{- define "nri-gpu.observes" -}}
{{- if eq (.Values.mode | default "") "observe" -}}
{{- if eq (toString .Values.kubelet.enabled) "true" -}}
{{- fail "mode observe gives no pod a GPU, and kubelet.enabled=true would make nri-gpu the nodes' device plugin: leave kubelet.enabled at auto, or set mode to \"\"" -}}
{{- end -}}
{{- if .Values.dra.enabled -}}
{{- fail "mode observe gives no pod a GPU, and dra.enabled=true would make nri-gpu a DRA driver: set dra.enabled=false, or mode to \"\"" -}}
{{- end -}}
true
{{- end -}}
{{- end }}

{{/* Where the runtimes of a node keep what their containers were made of, by the names of observe.runtimes. */}}
{{- define "nri-gpu.bundles" -}}
{{- $tasks := "io.containerd.runtime.v2.task" -}}
containerd: [/run/containerd/{{ $tasks }}]
k3s: [/run/k3s/containerd/{{ $tasks }}]
k0s: [/run/k0s/containerd/{{ $tasks }}]
microk8s: [/var/snap/microk8s/common/run/containerd/{{ $tasks }}]
docker-containerd: [/run/docker/containerd/daemon/{{ $tasks }}]
docker: [/var/lib/docker/containers]
podman: [/run/containers/storage/overlay-containers, /var/lib/containers/storage/overlay-containers]
crio: [/run/containers/storage/overlay-containers]
{{- end }}

{{/* The runtime of the cluster's nodes, as far as the API server tells it. */}}
{{- define "nri-gpu.runtime" -}}
{{- if regexMatch "\\+(k3s|rke2)" .Capabilities.KubeVersion.Version }}k3s
{{- else if contains "+k0s" .Capabilities.KubeVersion.Version }}k0s
{{- else if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}crio
{{- else }}containerd
{{- end }}
{{- end }}

{{/* The node's name, for what nri-gpu prints and sends. */}}
{{- define "nri-gpu.nodeName" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end }}

{{/* Begins the names of what lies in no namespace: neither part has a dot, so that no two releases share a name. */}}
{{- define "nri-gpu.clusterwide" -}}
{{ .Release.Namespace }}.{{ .Release.Name }}
{{- end }}

{{/* The options of the daemon that override its policy file: the Job that checks a policy takes them, too. */}}
{{- define "nri-gpu.overrides" -}}
- --socket={{ .Values.paths.nri }}/nri.sock
- --driver-root=/driver-root
- --driver-host-root={{ .Values.paths.driverRoot }}
- --stage-dir={{ .Values.paths.stage }}
{{- if .Values.labels.enabled }}
- --labels={{ .Values.labels.featuresDir }}/nri-gpu
{{- end }}
{{- if .Values.metrics.enabled }}
- --metrics={{ .Values.metrics.address }}:{{ .Values.metrics.port }}
- --metrics-public
{{- end }}
{{- if .Values.kubelet.enabled }}
- --kubelet
- --kubelet-registration={{ .Values.kubelet.registration }}
{{- else }}
- --no-kubelet
{{- end }}
{{- if .Values.dra.enabled }}
- --dra
- --dra-driver={{ .Values.dra.driver }}
- --dra-dir={{ .Values.kubelet.root }}/plugins
{{- else }}
- --no-dra
{{- end }}
{{- end }}
