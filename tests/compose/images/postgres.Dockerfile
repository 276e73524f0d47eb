# In the place of postgres:18-bookworm: Debian's PostgreSQL, told what to do in the same way.
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends libnss-wrapper postgresql && rm -rf /var/lib/apt/lists/*
COPY postgres.sh /usr/local/bin/
ENV PATH=/usr/lib/postgresql/15/bin:$PATH PGDATA=/var/lib/postgresql/data
STOPSIGNAL SIGINT
ENTRYPOINT ["postgres.sh"]
CMD ["postgres"]
