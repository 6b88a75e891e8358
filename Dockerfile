# A node on a CPU: docker build -t pulsenet . && docker run -v pulsenet:/data pulsenet join --role seed --token pulse1...
# For CUDA training processes build with --build-arg TORCH=torch; the daemon itself needs no GPU.
FROM python:3.11-slim-bookworm AS build
ARG TORCH=torch==2.13.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pulsenet pulsenet
COPY daemon daemon
RUN python -m venv /opt/pulsenet \
    && /opt/pulsenet/bin/pip install --no-cache-dir "$TORCH" \
    && /opt/pulsenet/bin/pip install --no-cache-dir '.[daemon]'

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 10001 pulsenet && install -d -o pulsenet -g pulsenet -m 0700 /data
COPY --from=build /opt/pulsenet /opt/pulsenet
ENV PATH=/opt/pulsenet/bin:$PATH \
    XDG_DATA_HOME=/data \
    NUMBA_CACHE_DIR=/data/numba \
    PYTHONUNBUFFERED=1
USER pulsenet
VOLUME /data
EXPOSE 4001 9471
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD \
    python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9471/livez', timeout=4)"
ENTRYPOINT ["pulsenet"]
CMD ["join", "--role", "seed", "--listen", "/ip4/0.0.0.0/tcp/4001", "--metrics-port", "9471"]
