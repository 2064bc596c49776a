//! What `bouncer check` prints: the configuration that would run, defaults filled in, secrets left out.

use std::fmt;
use std::time::Duration;

use humantime::format_duration;

use super::{Address, Config, Held, Loaded, LogFormat, field};
use crate::identity::Tier;

/// Width of the column of names.
const NAMES: usize = 14;

impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "configuration", format_args!("{}", self.origin))?;
        process(f, &self.config)?;
        stores(f, &self.config)?;
        identity(f, &self.config)?;
        admission(f, &self.config)?;
        for set in &self.overrides {
            row(f, "environment", format_args!("{} set by {}", set.path, set.variable))?;
        }
        self.warnings.iter().try_for_each(|warning| row(f, "warning", format_args!("{warning}")))
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, value: fmt::Arguments<'_>) -> fmt::Result {
    writeln!(f, "{name:NAMES$} {value}")
}

fn process(f: &mut fmt::Formatter<'_>, config: &Config) -> fmt::Result {
    let format = match config.log.format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    let level = config.log.level.as_str().to_ascii_lowercase();
    let held = match config.shutdown.held {
        Held::Refuse => "refuse",
        Held::Move => "move",
    };
    let (delay, drain) = (config.shutdown.delay, config.shutdown.drain);
    row(f, "listen", format_args!("grpc {}, admin {}", config.listen.grpc, config.listen.admin))?;
    row(f, "log", format_args!("level {level}, format {format}"))?;
    row(f, "shutdown", format_args!("delay {}, drain {}, held {held}", short(delay), short(drain)))
}

fn stores(f: &mut fmt::Formatter<'_>, config: &Config) -> fmt::Result {
    let Some(redis) = &config.redis else {
        row(f, "redis", format_args!("none: limits and slots in this process"))?;
        row(f, "rabbitmq", format_args!("none: waiting room in this process"))?;
        return row(f, "lease", format_args!("{}, which changes nothing without redis", short(config.lease)));
    };
    let (servers, prefix, timeout) = (&redis.servers, &redis.prefix, short(redis.timeout));
    row(f, "redis", format_args!("{servers}, prefix {prefix}, timeout {timeout}, on_outage {}", redis.on_outage))?;
    match &config.rabbitmq {
        Some(rabbitmq) => {
            let (url, timeout) = (rabbitmq.redacted_url(), short(rabbitmq.timeout));
            row(f, "rabbitmq", format_args!("{url}, timeout {timeout}, prefix {}", rabbitmq.prefix))?;
        }
        None => row(f, "rabbitmq", format_args!("none: each replica orders its own queue, by tier over all of them"))?,
    }
    row(f, "lease", format_args!("{}, after which a silent replica's slots are reclaimed", short(config.lease)))
}

fn identity(f: &mut fmt::Formatter<'_>, config: &Config) -> fmt::Result {
    let headers: Vec<&str> = config.credentials.headers.iter().map(http::HeaderName::as_str).collect();
    let forward = if config.credentials.forward { "forwarded" } else { "removed" };
    let public = if config.public.is_empty() { "none".to_owned() } else { config.public.join(", ") };
    let keys: usize = config.tenants.iter().map(|tenant| tenant.keys.len()).sum();
    row(f, "credentials", format_args!("{}, {forward} before the upstream", headers.join(", ")))?;
    row(f, "public", format_args!("{public}"))?;
    row(f, "tenants", format_args!("{} with {keys} key{}", config.tenants.len(), if keys == 1 { "" } else { "s" }))
}

fn admission(f: &mut fmt::Formatter<'_>, config: &Config) -> fmt::Result {
    let mut tenants = vec![0; config.tiers.len()];
    config.tenants.iter().for_each(|it| tenants[it.tenant.tier.rank] += 1);
    config.tiers.iter().zip(tenants).try_for_each(|(tier, tenants)| tier_row(f, tier, tenants))?;
    config.pools.iter().try_for_each(|pool| {
        row(f, "pool", format_args!("{}: max_in_flight {}, order strict", pool.name, pool.max_in_flight))
    })
}

fn tier_row(f: &mut fmt::Formatter<'_>, tier: &Tier, tenants: usize) -> fmt::Result {
    let (rate, burst) = (tier.quota.rate, tier.quota.burst);
    let (length, wait) = (tier.queue.length, short(tier.queue.max_wait));
    let outage = tier.on_outage.map(|policy| format!(", on_outage {policy}")).unwrap_or_default();
    let name = format_args!("{}: rate {}/{}, burst {burst}", tier.name, rate.count, field::per(rate)).to_string();
    let queue = if length == 0 { "never held".to_owned() } else { format!("queue {length} for up to {wait}") };
    let plural = if tenants == 1 { "" } else { "s" };
    row(f, "tier", format_args!("{name}, weight {}, {queue}{outage}, {tenants} tenant{plural}", tier.weight))
}

fn short(duration: Duration) -> humantime::FormattedDuration {
    format_duration(duration)
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
