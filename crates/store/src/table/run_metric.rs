//! `run_metric`: the curves of a run.

use rusqlite::{Connection, params};

use crate::error::Result;
use crate::query::Series;

pub(crate) fn append(c: &Connection, run: i64, step: u32, metrics: &[(String, f64)]) -> Result<()> {
    let mut insert = c.prepare_cached(
        "INSERT OR REPLACE INTO run_metric (run, step, name, value) VALUES (?1, ?2, ?3, ?4)",
    )?;
    for (name, value) in metrics.iter().filter(|(_, v)| v.is_finite()) {
        insert.execute(params![run, step, name, value])?;
    }
    Ok(())
}

/// Every series, thinned so that each bucket keeps its lowest and highest value.
pub(crate) fn series(c: &Connection, run: i64, points: usize) -> Result<Vec<Series>> {
    let rows = c
        .prepare_cached(
            "SELECT name, step, value FROM run_metric WHERE run = ?1 ORDER BY name, step",
        )?
        .query_map([run], |r| {
            Ok((
                r.get::<_, String>(0)?,
                r.get::<_, u32>(1)?,
                r.get::<_, f64>(2)?,
            ))
        })?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    let mut out: Vec<Series> = Vec::new();
    for (name, step, value) in rows {
        match out.last_mut() {
            Some((last, points)) if *last == name => points.push((step, value)),
            _ => out.push((name, vec![(step, value)])),
        }
    }
    if points >= 2 {
        for (_, values) in &mut out {
            *values = thin(values, points);
        }
    }
    Ok(out)
}

fn thin(values: &[(u32, f64)], points: usize) -> Vec<(u32, f64)> {
    if values.len() <= points {
        return values.to_vec();
    }
    let mut out = Vec::with_capacity(points);
    for bucket in values.chunks(values.len().div_ceil(points / 2)) {
        let by = |a: &&(u32, f64), b: &&(u32, f64)| a.1.total_cmp(&b.1);
        if let (Some(low), Some(high)) = (bucket.iter().min_by(by), bucket.iter().max_by(by)) {
            out.push(*low.min_by_step(high));
            if low.0 != high.0 {
                out.push(*low.max_by_step(high));
            }
        }
    }
    out
}

trait ByStep {
    fn min_by_step<'a>(&'a self, other: &'a Self) -> &'a Self;
    fn max_by_step<'a>(&'a self, other: &'a Self) -> &'a Self;
}

impl ByStep for (u32, f64) {
    fn min_by_step<'a>(&'a self, other: &'a Self) -> &'a Self {
        if self.0 <= other.0 { self } else { other }
    }

    fn max_by_step<'a>(&'a self, other: &'a Self) -> &'a Self {
        if self.0 > other.0 { self } else { other }
    }
}

#[cfg(test)]
mod tests {
    use super::thin;

    #[test]
    fn thinning_keeps_spikes_and_order() {
        let mut values: Vec<(u32, f64)> = (0..1000).map(|i| (i, 1.0)).collect();
        values[501].1 = 99.0;
        values[777].1 = -5.0;
        let thinned = thin(&values, 40);
        assert!(thinned.len() <= 40);
        assert!(thinned.contains(&(501, 99.0)) && thinned.contains(&(777, -5.0)));
        assert!(thinned.windows(2).all(|w| w[0].0 < w[1].0));
    }
}
