# The server. TORCH_INDEX is a package index with the build of torch that you want, such as one for
# CPUs only; without it pip installs torch from its default index.
FROM python:3.11-slim

ARG TORCH_INDEX=

ENV PYTHONUNBUFFERED=1 KVBOOST_HOME=/data/home KVBOOST_CACHE_DIR=/data/kv

# The kernels are compiled on first use. Without a compiler torch's own are used, which are slower.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir -c constraints.txt '.[serve,structured,remote,otel]'

# A number, so that Kubernetes can see that it is not root.
RUN useradd --create-home --uid 1000 kvboost && mkdir -p /data && chown kvboost /data
USER 1000
VOLUME /data
EXPOSE 8000

# Running answers get 30 s to end: give `docker stop` a little more, such as --time 45.
STOPSIGNAL SIGTERM
# Not /ready: some orchestrators restart an unhealthy container, and one that reads the documents of
# --warm, or lets its answers end, is well.
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["kvboost", "serve", "--host", "0.0.0.0"]
