# In the place of jaegertracing/jaeger: a receiver of spans at its ports, which says what it has at /spans.
ARG CONTROL_IMAGE
FROM ${CONTROL_IMAGE}
ENTRYPOINT ["sh", "-c", "exec python -m kite.testing.otlp 0.0.0.0:4318 0.0.0.0:13133 0.0.0.0:16686"]
