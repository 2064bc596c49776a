# The image of bouncer, and with `--target upstream` that of the sample upstream.
#
# Base images are pinned by tag. Pin them by digest as well where you build for production: a tag can be moved.

FROM rust:1.95.0-slim-bookworm AS build
WORKDIR /build
# What a build reads and nothing else, see .dockerignore.
COPY . .
# The caches stay with the builder, so what is needed is copied out of them in the same step.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target \
    cargo build --release --locked --bin bouncer --example upstream \
    && mkdir /out \
    && cp target/release/bouncer target/release/examples/upstream /out/

FROM debian:12.11-slim AS base
# By number, so that a cluster that demands a user other than root can see that it is one.
USER 65532:65532
COPY --from=build /out/bouncer /usr/local/bin/bouncer

FROM base AS upstream
COPY --from=build /out/upstream /usr/local/bin/upstream
EXPOSE 8081
HEALTHCHECK --interval=5s --timeout=3s --start-period=5s CMD ["bouncer", "probe", "--url", "http://127.0.0.1:8081/health"]
ENTRYPOINT ["upstream"]
CMD ["0.0.0.0:8081"]

# The last one is what a plain `docker build .` makes.
FROM base AS bouncer
# bouncer listens on loopback unless told otherwise; in a container that would be nobody.
ENV BOUNCER_LISTEN__GRPC=0.0.0.0:9191 BOUNCER_LISTEN__ADMIN=0.0.0.0:9192
EXPOSE 9191 9192
# bouncer is its own client here, as the image has no other.
HEALTHCHECK --interval=5s --timeout=3s --start-period=5s CMD ["bouncer", "probe"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["bouncer"]
CMD ["serve", "-c", "/etc/bouncer/bouncer.yaml"]
