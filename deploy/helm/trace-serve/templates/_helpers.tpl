{{- define "trace-serve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 50 characters, so that the suffixes of the other objects still fit into a label. */}}
{{- define "trace-serve.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "trace-serve.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "trace-serve.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Call with (dict "root" $ "component" "server"). */}}
{{- define "trace-serve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "trace-serve.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "trace-serve.labels" -}}
{{ include "trace-serve.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "trace-serve.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}
{{- end }}

{{- define "trace-serve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "trace-serve.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "trace-serve.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "trace-serve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "trace-serve.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "trace-serve.volumes" -}}
- name: policies
  {{- toYaml .Values.policy.volume | nindent 2 }}
- name: scratch
  emptyDir:
    sizeLimit: {{ .Values.scratch }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory }}
{{- end }}

{{- define "trace-serve.volumeMounts" -}}
- name: policies
  mountPath: {{ .Values.policy.mountPath }}
  readOnly: true
- name: scratch
  mountPath: /tmp
  subPath: tmp
- name: scratch
  mountPath: /home/trace
  subPath: home
- name: shared-memory
  mountPath: /dev/shm
{{- end }}

{{/* The pod of a server, for the Deployment here and for anything that takes a pod template. */}}
{{- define "trace-serve.podSpec" -}}
serviceAccountName: {{ include "trace-serve.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "trace-serve.podSecurity" . | nindent 2 }}
# The server stops its engine within 10 s after the drain; the rest is margin.
terminationGracePeriodSeconds: {{ add .Values.preStopSeconds .Values.drainSeconds 30 }}
containers:
  - name: server
    image: {{ include "trace-serve.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: ["serve", {{ .Values.policy.path | quote }}]
    securityContext: {{- include "trace-serve.containerSecurity" . | nindent 6 }}
    env:
      - name: TRACE_SERVE_MODE
        value: {{ .Values.mode }}
      - name: TRACE_SERVE_PORT
        value: "8080"
      - name: TRACE_SERVE_DRAIN_S
        value: {{ .Values.drainSeconds | quote }}
      # Shorter than the startup probe, so that the server itself says what the engine was waiting for.
      - name: TRACE_SERVE_ENGINE_START_TIMEOUT_S
        value: {{ sub .Values.startTimeoutSeconds 60 | quote }}
      {{- if or .Values.publicKey.configMap .Values.publicKey.secret }}
      - name: TRACE_SERVE_PUBLIC_KEY
        value: /etc/trace-serve/key/{{ .Values.publicKey.key }}
      {{- end }}
      {{- with .Values.policy.verdict }}
      - name: TRACE_SERVE_VERDICT
        value: {{ . | quote }}
      {{- end }}
      {{- if .Values.apiKey.secret }}
      - name: TRACE_SERVE_API_KEY
        valueFrom:
          secretKeyRef:
            name: {{ .Values.apiKey.secret }}
            key: {{ .Values.apiKey.key }}
      {{- end }}
      {{- if .Values.admin.enabled }}
      - name: TRACE_SERVE_ADMIN_HOST
        value: 0.0.0.0
      - name: TRACE_SERVE_ADMIN_PORT
        value: {{ .Values.admin.port | quote }}
      - name: TRACE_SERVE_ADMIN_KEY
        valueFrom:
          secretKeyRef:
            name: {{ .Values.admin.secret }}
            key: {{ .Values.admin.key }}
      {{- if not .Values.settings.registry }}
      - name: TRACE_SERVE_REGISTRY
        value: {{ .Values.policy.mountPath | quote }}
      {{- end }}
      {{- if not .Values.settings.state_dir }}
      # The volume of policies is read-only, so the audit log is kept elsewhere.
      - name: TRACE_SERVE_STATE_DIR
        value: /home/trace/state
      {{- end }}
      {{- end }}
      {{- range $name, $value := .Values.settings }}
      - name: TRACE_SERVE_{{ $name | upper }}
        value: {{ if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ printf "%.0f" $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}{{ else }}{{ $value | toString | quote }}{{ end }}
      {{- end }}
      {{- with .Values.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - name: http
        containerPort: 8080
      {{- if .Values.admin.enabled }}
      - name: admin
        containerPort: {{ .Values.admin.port }}
      {{- end }}
    # Weights are loaded while the probes below wait for this one.
    startupProbe:
      httpGet:
        path: /health/ready
        port: http
        scheme: {{ .Values.probeScheme }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ div (add .Values.startTimeoutSeconds 9) 10 }}
    # The process alone: it restarts a dead or frozen engine itself, and asks it for no token.
    livenessProbe:
      httpGet:
        path: /health/live
        port: http
        scheme: {{ .Values.probeScheme }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      httpGet:
        path: /health/ready
        port: http
        scheme: {{ .Values.probeScheme }}
      periodSeconds: 3
      timeoutSeconds: 3
      failureThreshold: 1
    lifecycle:
      preStop:
        sleep:
          seconds: {{ .Values.preStopSeconds }}
    resources: {{- toYaml .Values.resources | nindent 6 }}
    volumeMounts:
      {{- include "trace-serve.volumeMounts" . | nindent 6 }}
      {{- if or .Values.publicKey.configMap .Values.publicKey.secret }}
      - name: public-key
        mountPath: /etc/trace-serve/key
        readOnly: true
      {{- end }}
      {{- with .Values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- with include "trace-serve.placement" . | trim }}
{{ . }}
{{- end }}
volumes:
  {{- include "trace-serve.volumes" . | nindent 2 }}
  {{- if .Values.publicKey.configMap }}
  - name: public-key
    configMap:
      name: {{ .Values.publicKey.configMap }}
  {{- else if .Values.publicKey.secret }}
  - name: public-key
    secret:
      secretName: {{ .Values.publicKey.secret }}
  {{- end }}
  {{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
