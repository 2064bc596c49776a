//! A YAML file as a tree of figment's values.
//!
//! figment's own YAML source keeps the last of two equal keys, so that half of a pasted file wins in silence. This one
//! refuses them, and says in which line. It also tags values as they are made: a figment that holds a hundred thousand
//! tenants can only be read by copying all of them.

use std::collections::btree_map::Entry;
use std::fmt;

use figment::value::{Dict, Empty, Map, Num, Tag, Value};
use figment::{Error, Metadata, Profile, Provider};
use serde::de::{self, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, Visitor};

const FIELD_NAME: &str = "the name of a field";
const TWICE: &str = "a field given twice";
const TAG: &str = "a tag such as !name, which means nothing here";
/// What is refused here although it is YAML.
const OWN: [&str; 2] = [TWICE, TAG];

/// The file as figment knows it: a name for the faults, and a tag for the values.
pub(super) struct File<'a> {
    pub(super) name: &'a str,
}

impl File<'_> {
    const FIELD: &'static str = "file";

    fn profile() -> Profile {
        Profile::new(Self::FIELD)
    }

    /// The tag that stands for this file in a figment's data.
    pub(super) fn tag(data: &Map<Profile, Dict>) -> Tag {
        data.get(&Self::profile()).and_then(|fields| fields.get(Self::FIELD)).map_or(Tag::Default, Value::tag)
    }
}

impl Provider for File<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.name.to_owned())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, Error> {
        Ok(Self::profile().collect(Dict::from([(Self::FIELD.to_owned(), Value::from(true))])))
    }
}

/// Why a text is no map of fields; lines and columns count from 1.
pub(super) struct Unreadable {
    pub(super) found: String,
    pub(super) line: usize,
    pub(super) column: usize,
}

impl Unreadable {
    fn whole(found: &str) -> Self {
        Self { found: found.to_owned(), line: 1, column: 1 }
    }
}

/// The fields of a file, each value with this tag.
pub(super) fn parse(bytes: &[u8], tag: Tag) -> Result<Value, Unreadable> {
    let text = std::str::from_utf8(bytes).map_err(|error| not_utf8(&bytes[..error.valid_up_to()]))?;
    let text = text.trim_start_matches('\u{feff}');
    if text.lines().all(|line| matches!(line.trim_start().as_bytes().first(), None | Some(b'#'))) {
        return Err(Unreadable::whole("an empty file"));
    }
    match Any(tag).deserialize(serde_yaml::Deserializer::from_str(text)) {
        Ok(fields @ Value::Dict(..)) => Ok(fields),
        Ok(other) => Err(Unreadable::whole(super::reader::kind(&other))),
        Err(error) => Err(not_yaml(&error)),
    }
}

fn not_utf8(before: &[u8]) -> Unreadable {
    let mut lines = before.split(|byte| *byte == b'\n').rev();
    let column = lines.next().map_or(0, <[u8]>::len) + 1;
    Unreadable { found: "bytes that are not UTF-8".to_owned(), line: lines.count() + 1, column }
}

/// The parser's messages name places and tokens of YAML, never a scalar: [`Any`] has no type to be disappointed in.
fn not_yaml(error: &serde_yaml::Error) -> Unreadable {
    let message = error.to_string();
    let what = message.split(" at line ").next().unwrap_or(&message);
    let what = what.rsplit(": ").next().unwrap_or(what);
    let found = if what.ends_with(FIELD_NAME) {
        "a field whose name is not text".to_owned()
    } else if OWN.contains(&what) {
        what.to_owned()
    } else {
        format!("text that is not YAML ({what})")
    };
    let (line, column) = error.location().map_or((1, 1), |at| (at.line().max(1), at.column().max(1)));
    Unreadable { found, line, column }
}

/// Reads any YAML value, and tags it.
#[derive(Clone, Copy)]
struct Any(Tag);

impl<'de> DeserializeSeed<'de> for Any {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(self.0, value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Num(self.0, Num::I64(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Num(self.0, Num::U64(value)))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Num(self.0, Num::I128(value)))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(Value::Num(self.0, Num::U128(value)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Num(self.0, Num::F64(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(self.0, value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Empty(self.0, Empty::Unit))
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Empty(self.0, Empty::None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(self.0, items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Dict::new();
        while let Some(name) = map.next_key_seed(NewField(&fields))? {
            let value = map.next_value_seed(self)?;
            if let Entry::Vacant(field) = fields.entry(name) {
                field.insert(value);
            }
        }
        Ok(Value::Dict(self.0, fields))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _: A) -> Result<Value, A::Error> {
        Err(de::Error::custom(TAG))
    }
}

/// Reads a field's name that the map does not have yet. Refused here and not in the map, so that the error's line is
/// that of the second name.
struct NewField<'a>(&'a Dict);

impl<'de> DeserializeSeed<'de> for NewField<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NewField<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FIELD_NAME)
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<String, E> {
        if self.0.contains_key(name) {
            return Err(E::custom(TWICE));
        }
        Ok(name.to_owned())
    }
}
