{{/* Writes the node's ckptd.yaml out of the ConfigMap's. */}}
{{- define "holdfast.nodeConfigContainer" -}}
{{- $topology := and (ne .Values.cluster.membership "none") (ne .Values.topology.source "none") -}}
- name: node-config
  image: {{ include "holdfast.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [/usr/libexec/holdfast/node-config, /etc/holdfast-template/ckptd.yaml, /etc/holdfast/ckptd.yaml]
  env:
    - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    {{- if not (or (eq .Values.cluster.membership "none") (eq .Values.cluster.membership "members")) }}
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
    - {name: ADVERTISE, value: {{ include "holdfast.advertise" . }}}
    - {name: PORT, value: {{ .Values.cluster.port | int | quote }}}
    - {name: DNS_DOMAIN, value: {{ .Values.cluster.dnsDomain | quote }}}
    - {name: NODE_DOMAIN, value: {{ .Values.cluster.nodeDomain | quote }}}
    {{- end }}
    {{- if $topology }}
    - {name: TOPOLOGY_SOURCE, value: {{ .Values.topology.source }}}
    {{- range $i, $one := .Values.topology.labels }}
    - {name: TOPOLOGY_{{ $i }}, value: "{{ $one.name }}={{ $one.label }}"}
    {{- if eq $.Values.topology.source "podLabels" }}
    - {name: TOPOLOGY_VALUE_{{ $i }}, valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ $one.label }}']"}}}
    {{- end }}
    {{- end }}
    {{- end }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 64Mi}
  securityContext:
    runAsUser: 65532
    runAsGroup: 65532
    runAsNonRoot: true
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  volumeMounts:
    - {name: template, mountPath: /etc/holdfast-template, readOnly: true}
    - {name: settings, mountPath: /etc/holdfast}
    {{- if include "holdfast.asksApi" . }}
    - {name: node-reader, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- end }}
{{- end -}}

{{/* The kubelet makes directories of the node for root; this gives them to a daemon that is not root. */}}
{{- define "holdfast.ownerContainer" -}}
- name: owner
  image: {{ include "holdfast.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - /usr/bin/chown
    - "{{ int64 .Values.security.user }}:{{ int64 .Values.security.group }}"
    {{- range include "holdfast.nodeDirectories" . | fromYamlArray }}
    - {{ .path }}
    {{- end }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 64Mi}
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN]}
  volumeMounts:
    {{- range include "holdfast.nodeDirectories" . | fromYamlArray }}
    - {name: {{ .name }}, mountPath: {{ .path }}}
    {{- end }}
{{- end -}}

{{- define "holdfast.daemonSecurity" -}}
{{- $root := eq (int64 .Values.security.user) 0 -}}
runAsUser: {{ int64 .Values.security.user }}
runAsGroup: {{ int64 .Values.security.group }}
runAsNonRoot: {{ not $root }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if $root }}
  add:
    # Files of several users: given to them, made readable for their group, removed or overwritten when it is time.
    {{- $add := list "CHOWN" "DAC_OVERRIDE" "FOWNER" -}}
    {{- if .Values.fabric.rdma.resource -}}
    {{- $add = append $add "IPC_LOCK" -}}
    {{- end -}}
    {{- toYaml (concat $add .Values.security.extraCapabilities | uniq) | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "holdfast.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- with .Values.fabric.rdma -}}
{{- if .resource -}}
{{- $limits := merge (dict .resource (int .count)) (default (dict) $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The node's own directories: [{name, path, type}]. */}}
{{- define "holdfast.nodeDirectories" -}}
- {name: sockets, path: {{ .Values.socket.hostPath }}, type: DirectoryOrCreate}
- {name: memory, path: {{ .Values.memory.hostPath }}, type: DirectoryOrCreate}
- {name: state, path: {{ .Values.state.hostPath }}, type: DirectoryOrCreate}
{{- range $i, $path := .Values.nvme.hostPaths }}
- {name: nvme-{{ $i }}, path: {{ $path }}, type: Directory}
{{- end }}
{{- end -}}

{{- define "holdfast.mounts" -}}
{{- $cluster := .Values.cluster -}}
- {name: settings, mountPath: /etc/holdfast, readOnly: true}
{{- range include "holdfast.nodeDirectories" . | fromYamlArray }}
- {name: {{ .name }}, mountPath: {{ .path }}}
{{- end }}
{{- if .Values.remote.claimName }}
- {name: remote, mountPath: /remote{{ with .Values.remote.subPath }}, subPath: {{ . | quote }}{{ end }}}
{{- else if .Values.remote.hostPath }}
# A file system that is mounted again on the node is seen in the pod.
- {name: remote, mountPath: {{ .Values.remote.hostPath }}, mountPropagation: HostToContainer}
{{- end }}
{{- if and (ne $cluster.membership "none") $cluster.tls.enabled }}
- {name: cluster-certificates, mountPath: /etc/holdfast-certificates/cluster, readOnly: true}
{{- end }}
{{- if .Values.admin.tls.enabled }}
- {name: admin-certificates, mountPath: /etc/holdfast-certificates/admin, readOnly: true}
{{- end }}
{{- if eq $cluster.membership "externalEtcd" }}
{{- if $cluster.externalEtcd.tls.enabled }}
- {name: etcd-certificates, mountPath: /etc/holdfast-certificates/etcd, readOnly: true}
{{- end }}
{{- if $cluster.externalEtcd.auth.user }}
- {name: etcd-user, mountPath: /etc/holdfast-certificates/etcd-user, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "holdfast.volumes" -}}
{{- $cluster := .Values.cluster -}}
{{- $external := $cluster.externalEtcd -}}
{{- /* In the pod alone; a daemon that is not root could not read files of root's. */ -}}
{{- $mode := ternary "0400" "0444" (eq (int64 .Values.security.user) 0) -}}
- {name: template, configMap: {name: {{ include "holdfast.fullname" . }}}}
- {name: settings, emptyDir: {sizeLimit: 1Mi}}
{{- range include "holdfast.nodeDirectories" . | fromYamlArray }}
- {name: {{ .name }}, hostPath: {path: {{ .path }}, type: {{ .type }}}}
{{- end }}
{{- if .Values.remote.claimName }}
- {name: remote, persistentVolumeClaim: {claimName: {{ .Values.remote.claimName }}}}
{{- else if .Values.remote.hostPath }}
- {name: remote, hostPath: {path: {{ .Values.remote.hostPath }}, type: Directory}}
{{- end }}
{{- if include "holdfast.asksApi" . }}
- name: node-reader
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- if and (ne $cluster.membership "none") $cluster.tls.enabled }}
- name: cluster-certificates
  secret: {secretName: {{ include "holdfast.tlsSecret" . }}, defaultMode: {{ $mode }}}
{{- end }}
{{- if .Values.admin.tls.enabled }}
- name: admin-certificates
  secret: {secretName: {{ required "admin.tls.secretName: name the Secret with ca.crt, tls.crt and tls.key" .Values.admin.tls.secretName }}, defaultMode: {{ $mode }}}
{{- end }}
{{- if eq $cluster.membership "externalEtcd" }}
{{- if $external.tls.enabled }}
- name: etcd-certificates
  secret: {secretName: {{ required "cluster.externalEtcd.tls.secretName: name the Secret with ca.crt" $external.tls.secretName }}, defaultMode: {{ $mode }}}
{{- end }}
{{- if $external.auth.user }}
- name: etcd-user
  secret:
    secretName: {{ required "cluster.externalEtcd.auth.secretName: name the Secret with the password" $external.auth.secretName }}
    items: [{key: {{ $external.auth.passwordKey }}, path: password}]
    defaultMode: {{ $mode }}
{{- end }}
{{- end }}
{{- end -}}
