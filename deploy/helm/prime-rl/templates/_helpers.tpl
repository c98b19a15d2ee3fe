{{/* Name of all objects of the run; pods add their role. */}}
{{- define "prime-rl.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "prime-rl.labels" -}}
app.kubernetes.io/name: prime-rl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "prime-rl.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "prime-rl.secret" -}}
{{ .Values.secret.existing | default (include "prime-rl.name" .) }}
{{- end }}

{{/* Addresses of all servers, separated by commas. */}}
{{- define "prime-rl.urls" -}}
{{- $name := include "prime-rl.name" . -}}
{{- $urls := list -}}
{{- range $index := until (int .Values.inference.servers) -}}
{{- $urls = append $urls (printf "http://%s-inference-%d.%s-inference:%d/v1" $name $index $name (int $.Values.inference.port)) -}}
{{- end -}}
{{ join "," $urls }}
{{- end }}

{{/* Environment variables of all processes. */}}
{{- define "prime-rl.env" -}}
- name: OUTPUT_DIR
  value: /shared/{{ .Values.run.name }}
- name: HF_HOME
  value: /shared/huggingface
- name: INFERENCE_SERVER_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ include "prime-rl.secret" . }}, key: {{ .Values.secret.apiKey }}}
{{- if .Values.secret.huggingFace }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "prime-rl.secret" . }}, key: {{ .Values.secret.huggingFace }}}
{{- end }}
{{- if .Values.secret.wandb }}
- name: WANDB_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ include "prime-rl.secret" . }}, key: {{ .Values.secret.wandb }}}
{{- end }}
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* Resources of a pod: `context`, its `gpus` and its own `resources`. */}}
{{- define "prime-rl.resources" -}}
{{- $limits := dict -}}
{{- if .gpus -}}
{{- $limits = merge (dict .context.Values.gpuResource (int .gpus)) .context.Values.rdma -}}
{{- end -}}
{{- merge (dict "limits" $limits) .resources | toYaml }}
{{- end }}

{{- define "prime-rl.mounts" -}}
- {name: shared, mountPath: /shared}
- {name: recipes, mountPath: /recipes, readOnly: true}
- {name: memory, mountPath: /dev/shm}
{{- end }}

{{/* What the specs of all pods have in common. */}}
{{- define "prime-rl.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.run.graceSeconds }}
securityContext: {runAsNonRoot: true, runAsUser: 1001, fsGroup: 1001, fsGroupChangePolicy: OnRootMismatch}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: shared
    persistentVolumeClaim: {claimName: {{ .Values.storage.existingClaim | default (include "prime-rl.name" .) }}}
  - name: recipes
    configMap: {name: {{ include "prime-rl.name" . }}}
  - name: memory
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- end }}

{{/* Startup and liveness by the age of the heartbeat in `file`, a shell word. */}}
{{- define "prime-rl.probes" -}}
startupProbe:
  exec: &heartbeat
    command:
      - sh
      - -c
      - >-
        test $(( $(date +%s) - $(stat -c %Y "$OUTPUT_DIR/heartbeats/"{{ .file }}.json) )) -lt {{ .context.Values.probes.heartbeatSeconds }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ div (int .context.Values.probes.startSeconds) 10 }}
livenessProbe:
  exec: *heartbeat
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 3
{{- end }}

{{/* Arguments of `[role, ...]` that all roles share. */}}
{{- define "prime-rl.model" -}}
{{- with .Values.run.model }}
- --model.name
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "prime-rl.maxSteps" -}}
{{- with .Values.run.maxSteps }}
- --max-steps
- {{ . | quote }}
{{- end }}
{{- end }}
