# The program in a container, see docs/run.md:
#
#   docker build --tag resnet-tpu .                                              for TPUs
#   docker build --tag resnet-tpu --build-arg REQUIREMENTS=requirements.txt .    for CPUs
#   docker run --rm resnet-tpu --config=configs/fake_imagenet.py --workdir=/tmp/run
#
# requirements-cuda.txt is for NVIDIA GPUs. Results belong on gs:// or in a mounted folder.
FROM python:3.12-slim-bookworm AS packages
ARG REQUIREMENTS=requirements-tpu.txt
COPY ${REQUIREMENTS} /tmp/requirements.txt
RUN python -m venv /venv \
    && /venv/bin/python -m pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 trainer
COPY --from=packages /venv /venv
COPY . /app
WORKDIR /app
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000
ENTRYPOINT ["python", "main.py"]
