{{/* Name of all objects of the run; pods add their role. Short enough for the labels that Kubernetes derives from it. */}}
{{- define "prime-rl.name" -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" .Release.Name) }}
{{- fail (printf "the release name %s must begin with a letter and contain no dot, because services are named after it" .Release.Name) }}
{{- end }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
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
{{- if and (or .Values.secret.huggingFace .Values.secret.wandb) (not .Values.secret.existing) }}
{{- fail "secret.huggingFace and secret.wandb are entries of secret.existing, which is empty" }}
{{- end }}
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
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }} {{- /* not 1e+06 */}}
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

{{/* Where a pod may run, and how it gets its image. */}}
{{- define "prime-rl.placement" -}}
imagePullSecrets: {{- toYaml .Values.imagePullSecrets | nindent 2 }}
nodeSelector: {{- toYaml .Values.nodeSelector | nindent 2 }}
tolerations: {{- toYaml .Values.tolerations | nindent 2 }}
{{- end }}

{{/* Annotation of the pods of a role: a changed recipe starts new servers, and is refused for a job that exists. */}}
{{- define "prime-rl.recipe" -}}
prime-rl/recipe: {{ index .context.Values.recipes .role | sha256sum }}
{{- end }}

{{/* What the specs of the pods of the run have in common. */}}
{{- define "prime-rl.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.run.graceSeconds }}
securityContext: {runAsNonRoot: true, runAsUser: 1001, fsGroup: 1001, fsGroupChangePolicy: OnRootMismatch}
{{ include "prime-rl.placement" . }}
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
- {{ int64 . | quote }}
{{- end }}
{{- end }}
