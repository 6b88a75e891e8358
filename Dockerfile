# One node in a container, not as root, everything it keeps in /data:
#   docker build -t pulsenet .
#   docker run -v pulsenet:/data -p 4001:4001 -e PULSENET_ROLE=seed -e PULSENET_TOKEN=pulse1... pulsenet
# Every option of 'pulsenet join' is a variable PULSENET_<NAME>; other commands follow the image's name.
#   --build-arg VARIANT=cuda            torch with CUDA, for training loops and engines in this image
#   --build-arg EXTRAS=daemon,training  more of pulsenet's extras, separated by commas
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS build
ARG VARIANT=cpu
ARG TORCH=2.13.0
ARG EXTRAS=daemon
# Alone in its layer and first: it is the largest and changes the least. A node loads none of it, but pip installs it with
# hivemind, and training loops need it.
RUN python -m venv /opt/pulsenet \
    && case "$VARIANT" in \
        cpu) /opt/pulsenet/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH" ;; \
        cuda) /opt/pulsenet/bin/pip install --no-cache-dir "torch==$TORCH" ;; \
        *) echo "VARIANT is cpu or cuda, not '$VARIANT'" >&2; exit 2 ;; \
    esac
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pulsenet pulsenet
COPY daemon daemon
COPY deploy/man deploy/man
COPY deploy/constraints.txt deploy/constraints.txt
RUN /opt/pulsenet/bin/pip install --no-cache-dir --constraint deploy/constraints.txt ".[$EXTRAS]" \
    && /opt/pulsenet/bin/pulsenet --version

FROM python:${PYTHON}-slim-bookworm
LABEL org.opencontainers.image.title="pulsenet" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --create-home --uid 10001 pulsenet \
    && install -d -o pulsenet -g pulsenet -m 0700 /data /run-file
COPY --from=build /opt/pulsenet /opt/pulsenet
ENV PATH=/opt/pulsenet/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_DATA_HOME=/data \
    NUMBA_CACHE_DIR=/data/numba \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PULSENET_LISTEN=/ip4/0.0.0.0/tcp/4001 \
    PULSENET_METRICS_PORT=9471
USER 10001:10001
VOLUME /data
EXPOSE 4001 9471
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9471/livez', timeout=4)"]
ENTRYPOINT ["pulsenet"]
CMD ["join"]
