{{/*
Gives every value that is absent its default, and old names' values to new ones, in .Values itself: each template begins with
this. With `helm upgrade --reuse-values` a new chart sees none of its own defaults.
*/}}
{{- define "nri-gpu.defaults" -}}
{{- include "nri-gpu.unset" .Values -}}
{{- include "nri-gpu.complete" (list .Values (include "nri-gpu.added" . | fromYaml)) -}}
{{- include "nri-gpu.oldKeys" . -}}
{{- end }}

{{/*
Takes keys without a value out of a table, as Helm does unless it reuses values: Kubernetes would read them as "" or 0. Tables
in `global` are those of a parent chart and all of its charts, so they stay.
*/}}
{{- define "nri-gpu.unset" -}}
{{- $table := . -}}
{{- range $key, $value := . -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $table $key -}}
{{- else if and (kindIs "map" $value) (ne $key "global") -}}
{{- include "nri-gpu.unset" $value -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Gives a table the keys of another one that it lacks; what it has stays, false and empty, too. */}}
{{- define "nri-gpu.complete" -}}
{{- $table := index . 0 -}}
{{- range $key, $default := index . 1 -}}
{{- if or (not (hasKey $table $key)) (kindIs "invalid" (get $table $key)) -}}
{{- $_ := set $table $key $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $table $key)) -}}
{{- include "nri-gpu.complete" (list (get $table $key) $default) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The values that were added since the chart's version 0.1.0. */}}
{{- define "nri-gpu.added" -}}
nameOverride: ""
fullnameOverride: ""
namespaceOverride: ""
commonLabels: {}
global: {imageRegistry: "", imagePullSecrets: []}
image: {registry: "", digest: ""}
imagePullSecrets: []
serviceAccount: {create: true, name: "", annotations: {}}
rbac: {create: true}
extraObjects: []
metrics:
  annotations: true
  serviceMonitor:
    enabled: false
    interval: ""
    scrapeTimeout: ""
    labels: {}
    relabelings: []
    metricRelabelings: []
rules: {enabled: false, runbookUrl: ""}
dashboards: {enabled: false}
tolerateMissingKeys: [tolerate-missing.gpu.nri.io]
updateStrategy: {}
extraEnv: []
extraArgs: []
extraVolumes: []
extraVolumeMounts: []
guard: {extraEnv: [], extraArgs: [], extraVolumes: [], extraVolumeMounts: []}
dra:
  serviceAccount: {create: true, name: "", annotations: {}}
  updateStrategy: {}
  extraEnv: []
  extraArgs: []
  extraVolumes: []
  extraVolumeMounts: []
mode: ""
observe:
  nvml: false
  libraries: usr
  runtimes: []
  priorityClassName: ""
  resources:
    requests: {cpu: 10m, memory: 64Mi}
    limits: {memory: 256Mi}
  updateStrategy: {}
  extraEnv: []
  extraArgs: []
  extraVolumes: []
  extraVolumeMounts: []
paths: {remembered: /var/lib/nri-gpu}
pluginName: ""
requirePlugin: {enabled: false, namespaceSelector: {}}
{{- end }}

{{/*
Values of old names that are given, and what each means under a new one. One with its old default is not given:
--reuse-values brings them all.
*/}}
{{- define "nri-gpu.renamed" -}}
{{- if eq (toString .Values.metrics.scrape) "serviceMonitor" }}
- {old: metrics.scrape, new: metrics.serviceMonitor.enabled, value: {{ .Values.metrics.enabled }}}
{{- else if eq (toString .Values.metrics.scrape) "none" }}
- {old: metrics.scrape, new: metrics.annotations, value: false}
- {old: metrics.scrape, new: metrics.serviceMonitor.enabled, value: false}
{{- end }}
{{- with .Values.metrics.labels }}
- {old: metrics.labels, new: metrics.serviceMonitor.labels, value: {{ toJson . }}}
{{- end }}
{{- with .Values.image.pullSecrets }}
- {old: image.pullSecrets, new: imagePullSecrets, value: {{ toJson . }}}
{{- end }}
{{- with .Values.maxSurge }}
{{- if ne (toString .) "1" }}
- {old: maxSurge, new: updateStrategy, value: &surge {type: RollingUpdate, rollingUpdate: {maxSurge: {{ toJson . }}, maxUnavailable: 0}}}
- {old: maxSurge, new: dra.updateStrategy, value: *surge}
- {old: maxSurge, new: observe.updateStrategy, value: {type: RollingUpdate, rollingUpdate: {maxUnavailable: {{ toJson . }}}}}
{{- end }}
{{- end }}
{{- end }}

{{/* Gives the values of old names to the new ones. Done again, it changes nothing. */}}
{{- define "nri-gpu.oldKeys" -}}
{{- $values := .Values -}}
{{- $added := include "nri-gpu.added" . | fromYaml -}}
{{- range include "nri-gpu.renamed" . | fromYamlArray -}}
{{- $path := splitList "." .new -}}
{{- $table := $values -}}
{{- $defaults := $added -}}
{{- range initial $path -}}
{{- $table = get $table . -}}
{{- $defaults = get $defaults . -}}
{{- end -}}
{{- $given := get $table (last $path) | toJson -}}
{{- if eq $given (get $defaults (last $path) | toJson) -}}
{{- $_ := set $table (last $path) .value -}}
{{- else if ne $given (toJson .value) -}}
{{- /* With --reuse-values, Helm does not take away what was set. */ -}}
{{- fail (printf "%s is the old name of %s, and both are set and differ: remove %s (--set %s=null, and --reset-then-reuse-values in place of --reuse-values)" .old .new .old .old) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Begins the names of what lies in the namespace. */}}
{{- define "nri-gpu.fullname" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "nri-gpu.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{/* Begins the names of what lies in no namespace: neither part has a dot, so that no two releases share a name. */}}
{{- define "nri-gpu.clusterwide" -}}
{{ include "nri-gpu.namespace" . }}.{{ include "nri-gpu.fullname" . }}
{{- end }}

{{/* By which pods of one component are selected. Two releases in one namespace have different full names. */}}
{{- define "nri-gpu.selected" -}}
app.kubernetes.io/name: nri-gpu
app.kubernetes.io/instance: {{ include "nri-gpu.fullname" (index . 0) }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Labels of an object, of which component or "". What is selected by its name keeps that: "nri-gpu.serviceLabels". */}}
{{- define "nri-gpu.labels" -}}
{{- $root := index . 0 -}}
{{- $own := include "nri-gpu.selected" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/name" ($root.Values.nameOverride | default "nri-gpu") -}}
{{- $_ := set $own "app.kubernetes.io/version" $root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" $root.Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- merge $own $root.Values.commonLabels | toYaml -}}
{{- end }}

{{/* The same for a Service: what Prometheus calls the job is this name, and the alerts go by it. */}}
{{- define "nri-gpu.serviceLabels" -}}
{{- mergeOverwrite (include "nri-gpu.labels" . | fromYaml) (include "nri-gpu.selected" . | fromYaml) | toYaml -}}
{{- end }}

{{/* The account of daemon, guard and observer, which has no rights. */}}
{{- define "nri-gpu.account" -}}
{{ .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "nri-gpu.fullname" .) "default") }}
{{- end }}

{{/* The account of the DRA driver, the only one here that has rights. */}}
{{- define "nri-gpu.draAccount" -}}
{{ .Values.dra.serviceAccount.name | default (printf "%s-dra" (include "nri-gpu.fullname" .)) }}
{{- end }}

{{- define "nri-gpu.draSubject" -}}
kind: ServiceAccount
name: {{ include "nri-gpu.draAccount" . }}
namespace: {{ include "nri-gpu.namespace" . }}
{{- end }}

{{/* The image's name: the default cannot exist, because there is no public one. */}}
{{- define "nri-gpu.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is not set: there is no public image, so build one with deploy/Containerfile and name it as in your registry (--set image.repository=REGISTRY/nri-gpu)" $image.repository -}}
{{- with .Values.global.imageRegistry | default $image.registry }}{{ . }}/{{ end }}{{ $repository }}
{{- if or $image.tag (not $image.digest) }}:{{ $image.tag | default .Chart.AppVersion }}{{ end }}
{{- with $image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* Secrets for the registry, by name or as {name: ...}; what all charts of a parent have comes first. */}}
{{- define "nri-gpu.pullSecrets" -}}
{{- $names := list -}}
{{- range concat .Values.global.imagePullSecrets .Values.imagePullSecrets -}}
{{- $names = append $names (kindIs "map" . | ternary . (dict "name" .)) -}}
{{- end -}}
{{- with $names | uniq }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* If containerd may create nothing without nri-gpu (config/containerd/required-plugins.toml), a pod with these may be. */}}
{{- define "nri-gpu.tolerations" -}}
{{- range .Values.tolerateMissingKeys | uniq }}
{{ . }}: "true"
{{- end }}
{{- end }}

{{/* Annotations of a pod: those of a Job above, a pod's own, and the values'. */}}
{{- define "nri-gpu.podAnnotations" -}}
{{- $all := include "nri-gpu.tolerations" (index . 0) | fromYaml -}}
{{- range $key, $value := index . 1 -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- range $key, $value := (index . 0).Values.podAnnotations -}}
{{- if ne $value (get $all $key | default $value) -}}
{{- fail (printf "podAnnotations: the chart sets %s itself, to %s: remove it there" $key (get $all $key)) -}}
{{- end -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- with $all -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

{{/* By which a Prometheus without its operator finds the pods. */}}
{{- define "nri-gpu.scrapeAnnotations" -}}
{{- if and .Values.metrics.enabled .Values.metrics.annotations (not .Values.metrics.serviceMonitor.enabled) -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .Values.metrics.port | quote }}
{{- end }}
{{- end }}

{{/*
How an upgrade replaces the pods: as the values say, else by the surge of the second word. To a surge alone Kubernetes
would add its own maxUnavailable of 1, and refuse the two.
*/}}
{{- define "nri-gpu.updateStrategy" -}}
{{- $given := index . 0 -}}
{{- $rolling := $given.rollingUpdate | default (index . 1) -}}
{{- if include "nri-gpu.aboveZero" $rolling.maxSurge -}}
{{- $rolling = merge (dict) $rolling (dict "maxUnavailable" 0) -}}
{{- end -}}
updateStrategy:
{{- if eq ($given.type | default "") "OnDelete" }}
  type: OnDelete
{{- else }}
  type: RollingUpdate
  rollingUpdate:
    {{- toYaml $rolling | nindent 4 }}
{{- end }}
{{- end }}

{{/* Not empty where this count or percentage of pods is given and above 0. */}}
{{- define "nri-gpu.aboveZero" -}}
{{- if not (or (kindIs "invalid" .) (regexMatch "^0+%?$" (toString .))) }}true{{ end -}}
{{- end }}

{{/* Not empty where an upgrade by this strategy takes a node's pod away before the next one is there. */}}
{{- define "nri-gpu.leavesGap" -}}
{{- $rolling := .rollingUpdate | default (dict "maxSurge" 1) -}}
{{- if or (eq (.type | default "") "OnDelete") (not (include "nri-gpu.aboveZero" $rolling.maxSurge)) }}true{{ end -}}
{{- end }}

{{/* By which the runtime knows the daemon, as far as the values say it: a policy may have another name in plugin.name. */}}
{{- define "nri-gpu.pluginName" -}}
{{ .Values.pluginName | default "nri-gpu" }}
{{- end }}

{{/* The security context of a Job's container. OpenShift gives each namespace users of its own, and admits no other there. */}}
{{- define "nri-gpu.noRights" -}}
runAsNonRoot: true
{{- if not (.Capabilities.APIVersions.Has "security.openshift.io/v1") }}
runAsUser: 65534
{{- end }}
capabilities:
  drop: [ALL]
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
seccompProfile:
  type: RuntimeDefault
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
{{- if eq .Values.mode "observe" -}}
{{- if eq (toString .Values.kubelet.enabled) "true" -}}
{{- fail "mode observe gives no pod a GPU, and kubelet.enabled=true would make nri-gpu the nodes' device plugin: set kubelet.enabled=auto (true was an older chart's default, which --reuse-values keeps), or mode to \"\"" -}}
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

{{/* Of all runtimes that the values name. */}}
{{- define "nri-gpu.folders" -}}
{{- $bundles := include "nri-gpu.bundles" . | fromYaml }}
{{- $folders := list }}
{{- range .Values.observe.runtimes | default (list (include "nri-gpu.runtime" .)) }}
{{- $folders = concat $folders (get $bundles .) | uniq }}
{{- end }}
{{- toYaml $folders }}
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

{{/* The options of the daemon that override its policy file: the Job that checks a policy takes them, too. */}}
{{- define "nri-gpu.overrides" -}}
- --socket={{ .Values.paths.nri }}/nri.sock
{{- with .Values.pluginName }}
- --plugin-name={{ . }}
{{- end }}
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

{{/*
The options of all components that the chart sets: of each the value to set instead of an extra argument, or nothing if it
is the chart's own.
*/}}
{{- define "nri-gpu.options" -}}
policy: policy
watch-policy: ""
socket: paths.nri
plugin-name: pluginName
driver-root: paths.driverRoot
driver-host-root: paths.driverRoot
stage-dir: paths.stage
state-dir: paths.state
run-dir: ""
stand-by: ""
labels: labels.enabled
metrics: metrics.enabled
metrics-public: metrics.enabled
kubelet: kubelet.enabled
no-kubelet: kubelet.enabled
kubelet-registration: kubelet.registration
dra: dra.enabled
no-dra: dra.enabled
dra-driver: dra.driver
dra-dir: kubelet.root
gpus: simulation
node-name: ""
# By its own token, which a policy keeps to its node: with other credentials it would not be kept.
kubeconfig: ""
log-level: logLevel
help: ""
{{- end }}

{{/*
What the values add to a container, each after our own and none instead of it: the values' table, its name with a dot at
its end or "", and the rest, which differs. The programs take an option's beginning for the option.
*/}}
{{- define "nri-gpu.extraArgs" -}}
{{- $name := index . 1 -}}
{{- $options := include "nri-gpu.options" . | fromYaml -}}
{{- range $argument := (index . 0).extraArgs -}}
{{- $option := $argument | trimPrefix "--" | splitList "=" | first -}}
{{- range $known, $value := $options -}}
{{- if hasPrefix $option $known -}}
{{- $instead := $value | empty | ternary "which is the chart's own: remove it" (printf "which a value sets: remove it, and set %s" $value) -}}
{{- fail (printf "%sextraArgs: %s repeats --%s, %s" $name $argument $known $instead) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range (index . 0).extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "nri-gpu.extraEnv" -}}
{{- $name := index . 1 -}}
{{- $given := list "NVIDIA_VISIBLE_DEVICES" "NODE_NAME" -}}
{{- range (index . 0).extraEnv -}}
{{- if has .name (list "NVIDIA_VISIBLE_DEVICES" "NODE_NAME") -}}
{{- fail (printf "%sextraEnv: %s is the chart's own: remove it" $name .name) -}}
{{- else if has .name $given -}}
{{- fail (printf "%sextraEnv: %s is given twice: remove one of them" $name .name) -}}
{{- else if and (hasKey . "value") (hasKey . "valueFrom") -}}
{{- fail (printf "%sextraEnv: %s has value and valueFrom: remove one of them" $name .name) -}}
{{- end -}}
{{- $given = append $given .name -}}
{{- end -}}
{{- with (index . 0).extraEnv }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/*
What no mount may cover, beside the chart's own: where the program, its Python and the libraries of an image lie
(deploy/Containerfile, deploy/image.py), and what the runtime makes itself.
*/}}
{{- define "nri-gpu.kept" -}}
[/bin, /sbin, /lib, /lib64, /usr/bin, /usr/sbin, /usr/lib, /usr/lib64, /usr/local/bin, /usr/local/lib, /opt/nri-gpu,
/etc/nri-gpu, /run/termination-log, /proc, /sys, /dev]
{{- end }}

{{/* Not empty where one of two paths lies in the other. In most images, /var/run is a link to /run. */}}
{{- define "nri-gpu.overlap" -}}
{{- range $link := list "^$" "^/var/run/" -}}
{{- $one := regexReplaceAll $link (printf "%s/" (index $ 0 | clean | trimSuffix "/")) "/run/" -}}
{{- $other := regexReplaceAll $link (printf "%s/" (index $ 1 | clean | trimSuffix "/")) "/run/" -}}
{{- if or (hasPrefix $one $other) (hasPrefix $other $one) }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* With the mounts of our own, and their volumes, as YAML. What is ours is mounted nowhere else. */}}
{{- define "nri-gpu.volumeMounts" -}}
{{- $name := index . 1 -}}
{{- $own := index . 2 -}}
{{- $taken := list -}}
{{- range index . 3 | fromYamlArray -}}
{{- $taken = append $taken .name -}}
{{- end -}}
{{- $extra := list -}}
{{- range (index . 0).extraVolumes -}}
{{- if has .name $taken -}}
{{- fail (printf "%sextraVolumes: there is a volume %s already: give this one another name" $name .name) -}}
{{- end -}}
{{- $taken = append $taken .name -}}
{{- $extra = append $extra .name -}}
{{- end -}}
{{- $kept := list -}}
{{- range $own | fromYamlArray -}}
{{- $kept = append $kept .mountPath -}}
{{- end -}}
{{- $kept = concat $kept (include "nri-gpu.kept" . | fromYamlArray) -}}
{{- $paths := list -}}
{{- range $mount := (index . 0).extraVolumeMounts -}}
{{- if not (has .name $extra) -}}
{{- fail (printf "%sextraVolumeMounts: %sextraVolumes has no volume %s: add it there" $name $name .name) -}}
{{- end -}}
{{- range $kept -}}
{{- if include "nri-gpu.overlap" (list $mount.mountPath .) -}}
{{- fail (printf "%sextraVolumeMounts: %s covers %s or a part of it, which the container needs as it is: choose another path" $name $mount.mountPath .) -}}
{{- end -}}
{{- end -}}
{{- $path := clean .mountPath -}}
{{- if has $path $paths -}}
{{- fail (printf "%sextraVolumeMounts: %s is given twice: remove one of them" $name $path) -}}
{{- end -}}
{{- $paths = append $paths $path -}}
{{- end -}}
volumeMounts:
  {{- $own | nindent 2 }}
  {{- with (index . 0).extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
