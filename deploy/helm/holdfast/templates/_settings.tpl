{{/*
ckptd.yaml as the ConfigMap has it: what the chart knows, over .Values.settings. '@NODE_NAME@' and its like are put in on
each node by its init container (deploy/container/node-config).
*/}}
{{- define "holdfast.settings" -}}
{{- $remote := include "holdfast.remoteDir" . -}}
{{- $defaults := dict -}}
{{- $known := dict
    "node_name" "@NODE_NAME@"
    "state_dir" .Values.state.hostPath
    "socket" (dict "path" (printf "%s/ckptd.sock" .Values.socket.hostPath) "mode" .Values.socket.mode)
    "admin" (include "holdfast.adminSettings" . | fromYaml)
    "memory" (dict "dir" .Values.memory.hostPath)
    "health" (dict "address" (printf "%s:%d" .Values.listenHost (int .Values.health.port)))
    "metrics" (dict "address" (ternary (printf "%s:%d" .Values.listenHost (int .Values.metrics.port)) "off" .Values.metrics.enabled))
-}}
{{- if .Values.nvme.hostPaths -}}
{{- $_ := set $known "nvme" (dict "dirs" .Values.nvme.hostPaths) -}}
{{- end -}}
{{- if $remote -}}
{{- $_ := set $known "remote" (dict "dir" $remote) -}}
{{- $_ := set $defaults "remote" (dict "mounted" true) -}}
{{- end -}}
{{- if ne .Values.cluster.membership "none" -}}
{{- $_ := set $known "cluster" (include "holdfast.clusterSettings" . | fromYaml) -}}
{{- $_ := set $known "fabric" (dict "provider" .Values.fabric.provider) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $defaults (deepCopy .Values.settings) $known) -}}
{{- end -}}

{{- define "holdfast.adminSettings" -}}
{{- $tls := .Values.admin.tls -}}
path: {{ printf "%s/admin.sock" .Values.socket.hostPath }}
{{- if $tls.enabled }}
tls:
  address: {{ printf "%s:%d" .Values.listenHost (int $tls.port) | quote }}
  ca_file: /etc/holdfast-certificates/admin/ca.crt
  cert_file: /etc/holdfast-certificates/admin/tls.crt
  key_file: /etc/holdfast-certificates/admin/tls.key
  users:
    {{- toYaml $tls.users | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "holdfast.remoteDir" -}}
{{- if .Values.remote.claimName -}}/remote{{- else -}}{{ .Values.remote.hostPath }}{{- end -}}
{{- end -}}

{{- define "holdfast.clusterSettings" -}}
{{- $cluster := .Values.cluster -}}
name: {{ $cluster.name | quote }}
listen_address: {{ printf "%s:%d" .Values.listenHost (int $cluster.port) | quote }}
{{- if eq $cluster.membership "members" }}
members:
  {{- toYaml $cluster.members | nindent 2 }}
{{- else }}
advertise_address: '@ADVERTISE_ADDRESS@'
etcd:
  {{- include "holdfast.etcdSettings" . | nindent 2 }}
{{- end }}
{{- if ne .Values.topology.source "none" }}
labels: '@LABELS@'
{{- end }}
{{- if $cluster.tls.enabled }}
tls:
  ca_file: /etc/holdfast-certificates/cluster/ca.crt
  cert_file: /etc/holdfast-certificates/cluster/tls.crt
  key_file: /etc/holdfast-certificates/cluster/tls.key
{{- else }}
plaintext: {{ $cluster.plaintext }}
{{- end }}
{{- end -}}

{{- define "holdfast.etcdSettings" -}}
{{- $cluster := .Values.cluster -}}
{{- $external := $cluster.externalEtcd -}}
lease_ttl_ms: {{ $cluster.etcdLeaseTtl }}
request_timeout_ms: {{ $cluster.etcdRequestTimeout }}
{{- if eq $cluster.membership "ownEtcd" }}
endpoints:
  {{- range $i := until (int .Values.etcd.replicas) }}
  - {{ include "holdfast.etcdHost" (dict "root" $ "member" $i) }}:2379
  {{- end }}
{{- else }}
endpoints:
  {{- toYaml $external.endpoints | nindent 2 }}
prefix: {{ $external.prefix | quote }}
{{- if $external.tls.enabled }}
ca_file: /etc/holdfast-certificates/etcd/ca.crt
{{- if $external.tls.clientCertificate }}
cert_file: /etc/holdfast-certificates/etcd/tls.crt
key_file: /etc/holdfast-certificates/etcd/tls.key
{{- end }}
{{- end }}
{{- if $external.auth.user }}
user: {{ $external.auth.user | quote }}
password_file: /etc/holdfast-certificates/etcd-user/password
{{- end }}
{{- end }}
{{- end -}}

{{/* {root, member}: the name of one member of the chart's etcd. */}}
{{- define "holdfast.etcdHost" -}}
{{- $name := include "holdfast.etcdName" .root -}}
{{- printf "%s-%d.%s.%s.svc.%s" $name (int .member) $name .root.Release.Namespace .root.Values.cluster.dnsDomain -}}
{{- end -}}
