//! Prometheus text, read into numbers.

use std::collections::BTreeMap;

/// The samples of one scrape.
#[derive(Debug)]
pub(crate) struct Metrics(Vec<Sample>);

#[derive(Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Metrics {
    /// # Panics
    /// On a line that is neither a comment nor a sample.
    pub(crate) fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self(lines.map(|line| sample(line).unwrap_or_else(|| panic!("not a sample: {line}"))).collect())
    }

    /// The sum of all samples of this name that carry at least these labels; 0 where there is none.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|sample| sample.value).sum()
    }

    /// [`Metrics::sum`] of counters and gauges, which are whole numbers.
    ///
    /// # Panics
    /// When it is not a whole number.
    pub(crate) fn count(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let sum = self.sum(name, labels).to_string();
        sum.parse().unwrap_or_else(|_| panic!("{name}: {sum}"))
    }

    /// Whether a sample of this name carries at least these labels.
    pub(crate) fn has(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        self.matching(name, labels).next().is_some()
    }

    /// How many series there are.
    pub(crate) fn series(&self) -> usize {
        self.0.len()
    }

    fn matching<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        let carries = |sample: &Sample| {
            labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|found| found == value))
        };
        self.0.iter().filter(move |sample| sample.name == name && carries(sample))
    }
}

/// `name{key="value",...} number`, where a value may hold escaped quotes.
fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(key.trim_start_matches(',').to_owned(), value);
            rest = after;
        }
        rest = &rest[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// The text up to the closing quote, unescaped, and what follows the quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[test]
fn labels_are_read_with_their_escapes() {
    let metrics =
        Metrics::parse("# HELP a x\na{k=\"v\",q=\"say \\\"hi\\\", {ok}\"} 2\na{k=\"w\"} 3 1700000000\nb 1e3\n");
    assert_eq!((metrics.sum("a", &[]), metrics.sum("a", &[("k", "v")]), metrics.sum("b", &[])), (5.0, 2.0, 1000.0));
    assert!(metrics.has("a", &[("q", "say \"hi\", {ok}")]));
    assert!(!metrics.has("b", &[("k", "v")]));
}
