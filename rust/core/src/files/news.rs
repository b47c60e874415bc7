//! What people should know, each once per node.

use crate::files::atomic_box::AtomicBox;

/// What there is to tell; a bit of the segment says that somebody was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topic {
    Full = 1,
    Unwritable = 2,
    Vanished = 4,
    Foreign = 8,
    Unshared = 16,
    Background = 32,
    Many = 64,
    Odd = 128,
    Rowless = 256,
}

/// Lines that nobody has taken yet.
pub(crate) struct News(AtomicBox<String>);

impl News {
    pub(crate) const fn new() -> Self {
        Self(AtomicBox::new())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn put(&self, text: String) {
        let mut text = Box::new(text);
        while let Err(back) = self.0.put(text) {
            text = back;
            if let Some(before) = self.0.take() {
                *text = format!("{before}\n{text}");
            }
        }
    }

    pub(crate) fn take(&self) -> Option<String> {
        if self.is_empty() { None } else { self.0.take().map(|text| *text) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_news_is_lost_among_threads() {
        let news = News::new();
        let mut seen = String::new();
        std::thread::scope(|scope| {
            for t in 0..4 {
                let news = &news;
                scope.spawn(move || (0..500).for_each(|n| news.put(format!("{t}-{n}"))));
            }
            for _ in 0..100 {
                seen.extend(news.take().into_iter().chain(["\n".into()]));
                std::thread::yield_now();
            }
        });
        seen.extend(news.take());
        assert_eq!(seen.lines().filter(|line| !line.is_empty()).count(), 2000);
    }
}
