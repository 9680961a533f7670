//! URLs and forms as the WHATWG specifies them.

use rquickjs::{Array, CString, Ctx, Exception, Result, String, Value};
use url::{Url, form_urlencoded, quirks};

/// Longer input is refused: parsing allocates in ways that would abort the guest when memory is
/// short.
const MAX_BYTES: usize = 1 << 20;

fn text<'js>(ctx: &Ctx<'js>, text: String<'js>) -> Result<CString<'js>> {
    let text = super::utf8(ctx, text)?;
    if text.len() > MAX_BYTES {
        return Err(Exception::throw_range(ctx, "the URL is too long"));
    }
    Ok(text)
}

/// The parts of a URL, perhaps relative to `base`; null if it is invalid.
pub(super) fn parse<'js>(
    ctx: Ctx<'js>,
    input: String<'js>,
    base: Value<'js>,
) -> Result<Value<'js>> {
    let input = text(&ctx, input)?;
    let base = match base.into_string() {
        None => None,
        Some(base) => match Url::parse(text(&ctx, base)?.as_str()) {
            Ok(base) => Some(base),
            Err(_) => return Ok(Value::new_null(ctx)),
        },
    };
    match Url::options().base_url(base.as_ref()).parse(input.as_str()) {
        Ok(url) => parts(&ctx, &url),
        Err(_) => Ok(Value::new_null(ctx)),
    }
}

/// The parts of a URL after one of them was set; null if it cannot be set.
pub(super) fn set<'js>(
    ctx: Ctx<'js>,
    href: String<'js>,
    field: String<'js>,
    value: String<'js>,
) -> Result<Value<'js>> {
    let (href, value) = (text(&ctx, href)?, text(&ctx, value)?);
    let Ok(mut url) = Url::parse(href.as_str()) else {
        return Ok(Value::new_null(ctx));
    };
    let done = match super::utf8(&ctx, field)?.as_str() {
        "href" => quirks::set_href(&mut url, &value).map_err(drop),
        "protocol" => quirks::set_protocol(&mut url, &value),
        "username" => quirks::set_username(&mut url, &value),
        "password" => quirks::set_password(&mut url, &value),
        "host" => quirks::set_host(&mut url, &value),
        "hostname" => quirks::set_hostname(&mut url, &value),
        "port" => quirks::set_port(&mut url, &value),
        "pathname" => Ok(quirks::set_pathname(&mut url, &value)),
        "search" => Ok(quirks::set_search(&mut url, &value)),
        "hash" => Ok(quirks::set_hash(&mut url, &value)),
        _ => Err(()),
    };
    match done {
        Ok(()) => parts(&ctx, &url),
        Err(()) => Ok(Value::new_null(ctx)),
    }
}

/// In the order of `FIELDS` in `prelude/url.js`.
fn parts<'js>(ctx: &Ctx<'js>, url: &Url) -> Result<Value<'js>> {
    let origin = quirks::origin(url);
    let parts = Array::new(ctx.clone())?;
    let texts = [
        quirks::href(url),
        &origin,
        quirks::protocol(url),
        quirks::username(url),
        quirks::password(url),
        quirks::host(url),
        quirks::hostname(url),
        quirks::port(url),
        quirks::pathname(url),
        quirks::search(url),
        quirks::hash(url),
    ];
    for (index, part) in texts.into_iter().enumerate() {
        parts.set(index, part)?;
    }
    Ok(parts.into_value())
}

/// The [name, value] pairs of a query string without its question mark.
pub(super) fn form_parse<'js>(ctx: Ctx<'js>, input: String<'js>) -> Result<Array<'js>> {
    let input = text(&ctx, input)?;
    let pairs = Array::new(ctx.clone())?;
    for (index, (name, value)) in form_urlencoded::parse(input.as_str().as_bytes()).enumerate() {
        let pair = Array::new(ctx.clone())?;
        pair.set(0, &*name)?;
        pair.set(1, &*value)?;
        pairs.set(index, pair)?;
    }
    Ok(pairs)
}

/// The query string of alternating names and values.
pub(super) fn form_serialize<'js>(ctx: Ctx<'js>, flat: Array<'js>) -> Result<std::string::String> {
    let mut query = form_urlencoded::Serializer::new(std::string::String::new());
    let mut size = 0;
    for pair in 0..flat.len() / 2 {
        let name = text(&ctx, flat.get(pair * 2)?)?;
        let value = text(&ctx, flat.get(pair * 2 + 1)?)?;
        size += name.len() + value.len();
        if size > MAX_BYTES {
            return Err(Exception::throw_range(&ctx, "the parameters are too long"));
        }
        query.append_pair(&name, &value);
    }
    Ok(query.finish())
}
