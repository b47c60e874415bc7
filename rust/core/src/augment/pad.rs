//! Margins, in the four ways of torchvision.
#![allow(unsafe_code)] // reads of an image that others may write to

use super::buffers::out_of_memory;
use super::kernels::Level;
use super::points::of_channel;
use super::steps::{Margin, Padding};
use super::view::View;
use crate::error::Result;

/// Where the value of a place outside comes from; `None`: from the fill.
fn origin(place: isize, side: usize, mode: Margin) -> Option<usize> {
    let last = side as isize - 1;
    let inside = (0..=last).contains(&place);
    let from = match mode {
        _ if inside => place,
        Margin::Constant => return None,
        Margin::Edge => place.clamp(0, last),
        Margin::Reflect if place < 0 => -place,
        Margin::Reflect => 2 * last - place,
        Margin::Symmetric if place < 0 => -place - 1,
        Margin::Symmetric => 2 * last + 1 - place,
    };
    Some(from.clamp(0, last) as usize)
}

/// Writes the view with its margins, channel by channel.
///
/// # Safety
/// The image must be readable.
pub(super) unsafe fn pad(
    view: &View,
    padding: Padding,
    fill: &[f32],
    mode: Margin,
    to: &mut [u8],
    row: &mut [u8],
    level: Level,
) -> Result<()> {
    let [left, top, right, bottom] = padding.map(|side| side as usize);
    let (item, bytes) = (view.item, view.width * view.item);
    let (width, height) = (left + view.width + right, top + view.height + bottom);
    let row = &mut row[..view.channels * bytes];
    let outside = (0..left).chain(left + view.width..width);
    let mut columns: Vec<Option<usize>> = Vec::new();
    let no_room = |_| out_of_memory((left + right) * size_of::<Option<usize>>());
    columns.try_reserve_exact(left + right).map_err(no_room)?;
    columns.extend(outside.map(|x| origin(x as isize - left as isize, view.width, mode)));
    for y in 0..height {
        let from = origin(y as isize - top as isize, view.height, mode);
        if let Some(from) = from {
            // SAFETY: by the caller's promise.
            unsafe { view.copy_row(from, row, level) };
        }
        for channel in 0..view.channels {
            let value = of_channel(fill, channel);
            let filled = match item {
                1 => [value as u8; 4],
                _ => value.to_ne_bytes(),
            };
            let to = &mut to[(channel * height + y) * width * item..][..width * item];
            if from.is_none() {
                to.chunks_exact_mut(item).for_each(|to| to.copy_from_slice(&filled[..item]));
                continue;
            }
            let row = &row[channel * bytes..][..bytes];
            let (before, rest) = to.split_at_mut(left * item);
            let (middle, after) = rest.split_at_mut(bytes);
            middle.copy_from_slice(row);
            let sides = before.chunks_exact_mut(item).chain(after.chunks_exact_mut(item));
            for (to, column) in sides.zip(&columns) {
                to.copy_from_slice(match column {
                    Some(x) => &row[x * item..][..item],
                    None => &filled[..item],
                });
            }
        }
    }
    Ok(())
}
