# A GPU image: docker build -t oasr .
#   docker run --gpus all --shm-size=1g -p 8000:8000 -p 8001:8001 -p 8002:8002 oasr
# Requests reach the model through /dev/shm. Docker's default of 64 MB is too small for full
# batches; oasr-serve refuses to start there and says so.
# oasr-serve gives the server's threads 1 GiB of stack, so that no large request ends it. Where
# the daemon's hard limit is lower it says so; then add --ulimit stack=1073741824
# Another checkpoint: add -v /path/to/checkpoint:/checkpoint, and after the image's name
#   oasr-serve --checkpoint /checkpoint
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:24.10-py3
FROM ${TRITON_IMAGE}

# Images on Ubuntu 24.04 mark their Python as managed by apt; this container has no other use of it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/oasr
COPY pyproject.toml README.md ./
COPY oasr_backend/ oasr_backend/
COPY client/ client/
# This installs as `make install` does, without the server, which the image has, and the
# development tools.
RUN python3 -m pip install --no-cache-dir -e . 'typer>=0.12' 'rich>=13'
COPY model_repository/ model_repository/

EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready')"]
CMD ["oasr-serve"]
