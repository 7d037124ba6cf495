"""The application for ``serve run kvboost.deploy:app``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from kvboost.deploy.ray.front import Front
from kvboost.deploy.ray.options import DeployOptions
from kvboost.deploy.ray.replica import Replica

ROUTER = "kvboost.deploy.ray.router.ContentRouter"
SCALING = "kvboost.deploy.ray.scaling.kv_pressure"
REPORT_SECONDS = 2.0
LOOK_BACK_SECONDS = 10.0
"""Replicas are judged by the mean of what they report in this time."""
FLUSH_SECONDS = 30.0
"""Time to write the cache after the last answer."""


def build(args: Mapping[str, Any]) -> Any:
    """Two deployments: fronts that read and route requests, replicas that answer them. ``args`` are
    the fields of DeployOptions, as Serve reads them from a command line or a file."""
    return _build(DeployOptions(**args))


def _build(args: DeployOptions) -> Any:
    draining = {
        "graceful_shutdown_timeout_s": args.drain_seconds + FLUSH_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    replica = serve.deployment(Replica).options(
        name="Replica",
        max_ongoing_requests=args.max_ongoing,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        **draining,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"policy": args.policy, "remember": args.remember},
            request_routing_stats_period_s=REPORT_SECONDS,
            request_routing_stats_timeout_s=10.0,
        ),
        **_scaling(args),
    )
    front = serve.deployment(Front).options(
        name="Front",
        num_replicas=args.fronts,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.1},
        **draining,  # answers pass through it
    )
    bound = replica.bind(args.model_dump())
    return front.bind(bound, shared_cache=args.shared_cache)


def _scaling(args: DeployOptions) -> dict[str, Any]:
    if args.max_replicas is None:
        return {"num_replicas": args.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=args.replicas,
            max_replicas=args.max_replicas,
            initial_replicas=args.replicas,
            upscale_delay_s=args.upscale_seconds,
            downscale_delay_s=args.downscale_seconds,
            metrics_interval_s=REPORT_SECONDS,
            look_back_period_s=LOOK_BACK_SECONDS,
            policy=AutoscalingPolicy(policy_function=SCALING),
        )
    }
