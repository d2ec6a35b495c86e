{{- define "holdfast.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "holdfast.daemonSelector" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/component: ckptd
{{- end -}}

{{- define "holdfast.etcdSelector" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/component: etcd
{{- end -}}

{{/* What every object has besides; not in selectors, as it changes with the version. */}}
{{- define "holdfast.labels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "holdfast.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository: build deploy/container/Containerfile, push it to your registry, and name it here" $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.etcdName" -}}
{{- printf "%s-etcd" (include "holdfast.fullname" .) -}}
{{- end -}}

{{/* The Secret that has the certificates between the daemons. */}}
{{- define "holdfast.tlsSecret" -}}
{{- $tls := .Values.cluster.tls -}}
{{- if $tls.secretName -}}
{{- $tls.secretName -}}
{{- else if $tls.certManager.enabled -}}
{{- printf "%s-tls" (include "holdfast.fullname" .) -}}
{{- else -}}
{{- fail "cluster.tls.secretName: name the Secret with ca.crt, tls.crt and tls.key, or enable cluster.tls.certManager" -}}
{{- end -}}
{{- end -}}

{{- define "holdfast.advertise" -}}
{{- $cluster := .Values.cluster -}}
{{- if $cluster.advertise -}}
{{- $cluster.advertise -}}
{{- else -}}
{{- ternary "podDns" "ip" $cluster.tls.enabled -}}
{{- end -}}
{{- end -}}

{{/* Whether an init container asks the API for the node's labels. */}}
{{- define "holdfast.asksApi" -}}
{{- if and (ne .Values.cluster.membership "none") (eq .Values.topology.source "api") .Values.topology.labels -}}true{{- end -}}
{{- end -}}

{{/* What contradicts itself in ways that a schema cannot say. */}}
{{- define "holdfast.check" -}}
{{- $cluster := .Values.cluster -}}
{{- if and (eq $cluster.membership "externalEtcd") (not $cluster.externalEtcd.endpoints) -}}
{{- fail "cluster.externalEtcd.endpoints: cluster.membership is externalEtcd, so at least one is needed, HOST:PORT each" -}}
{{- end -}}
{{- if and (ne $cluster.membership "externalEtcd") $cluster.externalEtcd.endpoints -}}
{{- fail (printf "cluster.externalEtcd.endpoints: they are not used with cluster.membership %s; set that to externalEtcd, or remove them" $cluster.membership) -}}
{{- end -}}
{{- if and (eq $cluster.membership "members") (not $cluster.members) -}}
{{- fail "cluster.members: cluster.membership is members, so all nodes are to be listed, {name, address} each" -}}
{{- end -}}
{{- if and (ne $cluster.membership "members") $cluster.members -}}
{{- fail (printf "cluster.members: they are not used with cluster.membership %s; set that to members, or remove them" $cluster.membership) -}}
{{- end -}}
{{- if and (eq $cluster.membership "members") (not .Values.hostNetwork) -}}
{{- fail "hostNetwork: a list of members names fixed addresses, and pods have none outside of the node's network; set it to true, or use an etcd" -}}
{{- end -}}
{{- if and (eq $cluster.membership "members") $cluster.advertise -}}
{{- fail "cluster.advertise: with cluster.members each node is reached as the list says; remove it" -}}
{{- end -}}
{{- if and (eq $cluster.advertise "nodeName") (not .Values.hostNetwork) -}}
{{- fail "cluster.advertise: nodeName leads to the node, and the daemon listens in its pod; set hostNetwork, or advertise ip or podDns" -}}
{{- end -}}
{{- if and (ne .Values.fabric.provider "tcp") (ne .Values.fabric.provider "off") (not .Values.fabric.rdma.resource) -}}
{{- fail (printf "fabric.rdma.resource: fabric.provider %s wants RDMA devices; name the device plugin's resource, or use provider tcp" .Values.fabric.provider) -}}
{{- end -}}
{{- if and .Values.fabric.rdma.resource (ne (int64 .Values.security.user) 0) -}}
{{- fail "security.user: RDMA pins memory with the capability IPC_LOCK, which only root has in a pod; use 0, or leave fabric.rdma.resource empty" -}}
{{- end -}}
{{- if and (ne (int64 .Values.security.user) 0) .Values.security.extraCapabilities -}}
{{- fail "security.extraCapabilities: only root has capabilities in a pod; use security.user 0, or remove them" -}}
{{- end -}}
{{- if and .Values.remote.claimName .Values.remote.hostPath -}}
{{- fail "remote: claimName and hostPath are two places; give one" -}}
{{- end -}}
{{- if and .Values.hostNetwork .Values.networkPolicy.enabled (eq $cluster.membership "ownEtcd") (not .Values.networkPolicy.nodeCidrs) -}}
{{- fail "networkPolicy.nodeCidrs: with hostNetwork the daemons reach the etcd from the nodes' addresses; name their ranges, or disable networkPolicy" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "podMonitor: there is nothing to scrape while metrics.enabled is false" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.hostNetwork) (not .Values.networkPolicy.metricsFrom) -}}
{{- fail "networkPolicy.metricsFrom: podMonitor is enabled and the network policy lets no scraper in; name Prometheus' namespace, [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- if and .Values.admin.tls.enabled (not .Values.admin.tls.users) -}}
{{- fail "admin.tls.users: nobody is listed, so nobody would be let in; say whom each certificate stands for, [{certificate: alice, uid: 1001}]" -}}
{{- end -}}
{{- if and .Values.admin.tls.enabled .Values.networkPolicy.enabled (not .Values.hostNetwork) (not .Values.networkPolicy.adminFrom) -}}
{{- fail "networkPolicy.adminFrom: admin.tls is enabled and the network policy lets nobody reach it; name from where, [{ipBlock: {cidr: 10.1.0.0/16}}]" -}}
{{- end -}}
{{- if and $cluster.tls.enabled (eq $cluster.membership "none") -}}
{{- fail "cluster.tls: with cluster.membership none there are no connections between daemons; disable it, or choose another membership" -}}
{{- end -}}
{{- if not (or $cluster.tls.enabled $cluster.plaintext (eq $cluster.membership "none")) -}}
{{- fail "cluster.tls: without it whoever reaches the daemons' port could read shards, and speak as any node; enable it, or, where the network is trusted, set cluster.plaintext to true" -}}
{{- end -}}
{{- if and $cluster.tls.certManager.enabled (not $cluster.tls.enabled) -}}
{{- fail "cluster.tls.certManager: its certificates are not used while cluster.tls.enabled is false" -}}
{{- end -}}
{{- end -}}
